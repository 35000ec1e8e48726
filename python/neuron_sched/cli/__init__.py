"""The command `neuron-sched`.

Exit status: 0 on success; 2 for a usage error, an invalid configuration, bad rows, or files that cannot be read or
written; 3 if the replay ended and requests were rejected.
"""

from neuron_sched.cli.entry import main

__all__ = ["main"]
