"""`python -m neuron_sched` is the command `neuron-sched`."""

from neuron_sched.cli import main

raise SystemExit(main())
