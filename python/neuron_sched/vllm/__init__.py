"""Schedulers for vLLM, drop-ins for `--scheduler-cls`; nothing here imports vLLM before it is used."""
