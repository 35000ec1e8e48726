"""The command `neuron-sched`.

Exit status: 0; 2 for a usage error, a faulty configuration, bad rows or files that cannot be read or written; 3 when a
replay ended but requests were refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from neuron_sched import NeuronConfig, __version__
from neuron_sched.atomic import write_atomically
from neuron_sched.options import OPTIONS, add_options, config_of, given
from neuron_sched.simulate import TableCost, cost_of, profiles, replay
from neuron_sched.trace import TraceRequest, encode_trace, read_trace, synthetic

EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

NO_FLAGS: Mapping[str, str] = {}
COST_FLAGS = {"cost": "--cost", "prefill_ms": "--cost: prefill_ms", "decode_ms": "--cost: decode_ms"}
WORKLOAD_FLAGS = {"requests": "--requests", "rate_per_s": "--rate", "seed": "--seed"}
"""How the command line spells the fields that a complaint may begin with."""

DEFAULT_COST = "prefill_ms=100,decode_ms=25"
REFUSALS_SHOWN = 5

T = TypeVar("T")


class UsageError(Exception):
    """What the caller must mend, one fault a line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; argparse exits by itself for `--help` and usage errors."""
    arguments = _parser().parse_args(argv)
    try:
        if sys.stdout is None:
            if not arguments.quiet or arguments.json == "-":
                raise UsageError("standard output: is closed: expected a file, a pipe or a terminal")
            # Takes the place of the closed one, so that no file that is opened later becomes standard output.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        for fault in str(error).splitlines():
            _tell(f"error: {fault}")
        return EXIT_USAGE
    except MemoryError:
        _tell("error: out of memory: expected a smaller workload")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        _tell(f"error: standard output: {error.strerror}")
        return EXIT_USAGE
    return status


def _tell(line: str) -> None:
    """A line for whoever reads the messages: never to standard output, even when standard error is closed."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def _drop_output() -> None:
    """Nobody takes what is still to be written, and the interpreter's own flush at exit must not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neuron-sched",
        description="Continuous batching on hardware that runs only compiled shapes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_replay(commands)
    return parser


def _add_replay(commands: Any) -> None:
    command = commands.add_parser(
        "replay",
        help="latencies, throughput and padding of a workload, without the hardware",
        usage="neuron-sched replay [OPTION]... [TRACE]",
        description="Replays a workload through the scheduler on a virtual clock: what latencies, what throughput and "
        "how much padding would a configuration have?",
        epilog="Exit status: 0; 2 for usage errors, bad rows and unreadable files; 3 when requests were refused.",
        allow_abbrev=False,
    )
    command.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="CSV or JSON lines, plain, Azure or Mooncake, gzip or not (default: a synthetic chat workload)",
    )
    command.add_argument("--skip-bad", action="store_true", help="leave bad rows out and say how many")
    command.add_argument(
        "--scheduler",
        choices=("bucket", "mixed"),
        default="bucket",
        help="bucket: a step is all prefill or all decode, padded (default); mixed: a token budget, no padding",
    )
    command.add_argument(
        "--cost",
        default=DEFAULT_COST,
        metavar="COST",
        help="step times: prefill_ms=N,decode_ms=N, or a profile, one of "
        f"{', '.join(profiles())} or a .toml file (default: {DEFAULT_COST})",
    )
    output = command.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write the numbers as JSON (-: to standard output, without tables)"
    )
    output.add_argument("--write-trace", metavar="FILE", help="write the workload as .csv or .jsonl, .gz if wanted")
    output.add_argument("--quiet", action="store_true", help="no tables and no progress bar")
    made = command.add_argument_group("synthetic workload (without TRACE)")
    made.add_argument("--requests", type=int, metavar="N", help="how many (default: 3000)")
    made.add_argument("--rate", type=float, metavar="N", help="arrivals a second, on average (default: 5)")
    made.add_argument("--seed", type=int, metavar="N", help="another workload for another number (default: 0)")
    add_options(command)
    command.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    config = _collect(faults, lambda: config_of(arguments), {option.field: option.flag for option in OPTIONS})
    cost = _collect(faults, lambda: cost_of(arguments.cost), COST_FLAGS)
    workload = _collect(faults, lambda: _workload(arguments), WORKLOAD_FLAGS if arguments.trace is None else {})
    _collect(faults, lambda: _check_outputs(arguments))
    trace_bytes = None
    if arguments.write_trace is not None and workload is not None:
        trace_bytes = _collect(faults, lambda: encode_trace(arguments.write_trace, workload))
    if faults or config is None or cost is None or workload is None:
        raise UsageError("\n".join(faults))

    tables = _tables_wanted(arguments)
    if tables:
        from neuron_sched.report import progress_bar, write_tables
    if arguments.scheduler == "mixed" and (idle := [option.flag for option in given(arguments) if not option.mixed]):
        _tell(f"no effect with --scheduler mixed: {', '.join(idle)}")
    with progress_bar(len(workload)) if tables else nullcontext() as progress:
        try:
            result = replay(workload, config=config, cost=cost, scheduler=arguments.scheduler, progress=progress)
        except ValueError as error:
            raise UsageError(_spelled(error, COST_FLAGS)) from error
    if isinstance(cost, TableCost) and (beyond := _beyond(cost, result.summary, arguments.scheduler, config)):
        _tell(f"extrapolated: {beyond} ({arguments.cost} ends there)")
    if trace_bytes is not None:
        _write(arguments.write_trace, trace_bytes)
    if arguments.json is not None:
        _write(arguments.json, result.to_json().encode())
    if tables:
        write_tables(result.summary, title=_title(arguments, len(workload)), setting=_setting(arguments, config))
    return _status(result.summary)


def _collect(faults: list[str], make: Callable[[], T], flags: Mapping[str, str] = NO_FLAGS) -> T | None:
    """What `make` returns; its complaint is put with the others, so that all are seen at once."""
    try:
        return make()
    except (ValueError, OSError, UsageError) as error:
        faults.append(_spelled(error, flags))
        return None


def _spelled(error: Exception, flags: Mapping[str, str]) -> str:
    """The faults, one a line, with each field that begins one spelled as its option."""
    lines = (line.partition(": ") for line in str(error).splitlines())
    return "\n".join(f"{flags.get(field, field)}{colon}{rest}" for field, colon, rest in lines)


def _beyond(cost: TableCost, summary: Mapping[str, Any], scheduler: str, config: NeuronConfig) -> str:
    """The step times that no measured point bounds, in words; empty when there are none.

    Looks at the padded sizes of the run; where nothing is padded, at the largest ones that a step may have.
    """
    padding = summary["padding"]
    largest = {kind: max(map(int, padding[kind]), default=0) for kind in ("prefill", "decode")}
    if scheduler == "mixed":
        largest = {"prefill": config.max_num_batched_tokens, "decode": config.max_num_seqs}
    last = {"prefill": max(cost.prefill), "decode": max(cost.decode)}
    units = {"prefill": "token", "decode": "row"}
    return ", ".join(
        f"{kind} times beyond {_plural(last[kind], unit)}" for kind, unit in units.items() if largest[kind] > last[kind]
    )


def _workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    knobs = {"requests": arguments.requests, "rate_per_s": arguments.rate, "seed": arguments.seed}
    turned = {name: value for name, value in knobs.items() if value is not None}
    if arguments.trace is None:
        return synthetic(**turned)
    if turned:
        names = ", ".join(WORKLOAD_FLAGS[name] for name in turned)
        raise UsageError(f"{names}: for the synthetic workload only, not with TRACE")
    trace = read_trace(arguments.trace, skip_bad=arguments.skip_bad)
    if trace.skipped:
        _tell(f"{_plural(trace.skipped, 'row')} skipped")
    return trace


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Finds out before the run what would make its result unwritable."""
    for option, name in (("--json", arguments.json), ("--write-trace", arguments.write_trace)):
        if name is None or (option == "--json" and name == "-"):
            continue
        place = Path(name)
        if place.is_dir() or not place.parent.is_dir():
            raise UsageError(f"{option}: {name}: no such place for a file")
        if arguments.trace is not None and place.exists() and place.samefile(arguments.trace):
            raise UsageError(f"{option}: {name}: is the trace itself")
    results, trace = arguments.json, arguments.write_trace
    if None not in (results, trace) and results != "-" and os.path.realpath(results) == os.path.realpath(trace):
        raise UsageError(f"--json, --write-trace: {trace}: is one file: expected two")


def _tables_wanted(arguments: argparse.Namespace) -> bool:
    if arguments.quiet or arguments.json == "-":
        return False
    if find_spec("rich") is not None:
        return True
    advice = "the tables need rich: pip install rich"
    if arguments.json is None:
        raise UsageError(f"{advice}, or ask for --json")
    _tell(advice)
    return False


def _write(name: str, data: bytes) -> None:
    if name == "-":
        sys.stdout.write(data.decode())
        return
    try:
        write_atomically(name, data)
    except OSError as error:
        raise UsageError(f"{name}: cannot be written: {error.strerror}") from error


def _title(arguments: argparse.Namespace, requests: int) -> str:
    workload = "a synthetic chat workload" if arguments.trace is None else Path(arguments.trace).name
    return f"{workload}: {_plural(requests, 'request')}"


def _setting(arguments: argparse.Namespace, config: NeuronConfig) -> list[str]:
    """What decides the result, in words."""
    cache = f"{config.num_blocks:,} KV blocks of {_plural(config.block_size, 'token')}"
    steps = f"{_plural(config.max_num_batched_tokens, 'token')} a step"
    return [
        f"{arguments.scheduler} scheduler, {_plural(config.max_num_seqs, 'slot')}, {steps}, {cache}",
        f"step times: {arguments.cost}",
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _status(summary: Mapping[str, Any]) -> int:
    refused: list[dict[str, str]] = summary["rejections"]
    if not refused:
        return 0
    of_all = f"{_plural(len(refused), 'request')} of {summary['completed'] + len(refused):,} refused"
    _tell(f"{of_all}:")
    for request in refused[:REFUSALS_SHOWN]:
        _tell(f"  {request['id']}: {request['reason']}")
    if len(refused) > REFUSALS_SHOWN:
        _tell(f"  and {len(refused) - REFUSALS_SHOWN:,} more")
    return EXIT_REFUSED
