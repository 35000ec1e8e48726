"""The command `neuron-sched`, run as `python -m neuron_sched`."""

from neuron_sched.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
