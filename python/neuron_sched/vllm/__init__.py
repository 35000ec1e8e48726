"""Schedulers for vLLM's `--scheduler-cls`. Importing this package does not import vLLM."""
