"""Entry point of the command `neuron-sched`: parser, exit statuses, and the errors that no command handles."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from neuron_sched._native import __version__
from neuron_sched.cli.messages import UsageError, print_stderr
from neuron_sched.cli.replay import add_replay

COMMANDS = (add_replay,)
"""Functions that add the subparser of a command, one for each. The default `run` of a subparser returns the status."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. For `--help` and usage errors, argparse raises `SystemExit`."""
    arguments = _parser().parse_args(argv)
    try:
        if sys.stdout is None:
            if not arguments.quiet or arguments.json == "-":
                raise UsageError("standard output: closed: expected a file, a pipe or a terminal")
            # The null device takes the free file descriptor, so that no file opened later becomes standard output.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        for fault in str(error).splitlines():
            print_stderr(f"error: {fault}")
        return EXIT_USAGE
    except MemoryError:
        print_stderr("error: out of memory: expected a smaller workload")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        print_stderr(f"error: standard output: {error.strerror}")
        return EXIT_USAGE
    return status


def _drop_output() -> None:
    """Redirect standard output to the null device: the interpreter's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neuron-sched",
        description="Continuous batching on hardware that runs only compiled shapes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(commands)
    return parser
