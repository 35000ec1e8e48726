"""`python -m neuron_sched` is the command `neuron-sched`."""

from neuron_sched.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
