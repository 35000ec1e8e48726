"""The command `replay`, which reports latencies, throughput and padding of a workload on a virtual clock."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuron_sched._native import NeuronConfig
from neuron_sched.atomic import write_atomically
from neuron_sched.cli.messages import UsageError, collect, plural, print_stderr, with_flags
from neuron_sched.cli.options import OPTIONS, add_options, config_of, options_with_value
from neuron_sched.progress import progress_bar
from neuron_sched.simulate import TableCost, cost_of, profiles, replay
from neuron_sched.trace import TraceRequest, encode_trace, read_trace, synthetic

EXIT_REJECTED = 3

COST_FLAGS = {"cost": "--cost", "prefill_ms": "--cost: prefill_ms", "decode_ms": "--cost: decode_ms"}
WORKLOAD_FLAGS = {"requests": "--requests", "rate_per_s": "--rate", "seed": "--seed"}
"""Options for `with_flags`, by the field name with which an error message begins; `COST_FLAGS` likewise."""

DEFAULT_COST = "prefill_ms=100,decode_ms=25"
REJECTIONS_PRINTED = 5


def add_replay(commands: Any) -> None:
    """Add the subparser of `replay`."""
    command = commands.add_parser(
        "replay",
        help="report latencies, throughput and padding of a workload, without the hardware",
        usage="neuron-sched replay [OPTION]... [TRACE]",
        description="Replay a workload through the scheduler on a virtual clock, and report the latencies, throughput "
        "and padding of a configuration.",
        epilog="Exit status: 0 on success; 2 for usage errors, bad rows, and files that cannot be read or written; "
        "3 if requests were rejected.",
        allow_abbrev=False,
    )
    command.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="trace in plain CSV or JSON lines, Azure or Mooncake format, with or without gzip "
        "(default: a synthetic chat workload)",
    )
    command.add_argument("--skip-bad", action="store_true", help="skip bad rows and print their number")
    command.add_argument(
        "--scheduler",
        choices=("bucket", "mixed"),
        default="bucket",
        help="bucket: a step is all prefill or all decode, padded (default); "
        "mixed: a step has a token budget and no padding",
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
        "--json", metavar="FILE", help="write the summary as JSON (-: to standard output, without tables)"
    )
    output.add_argument(
        "--write-trace",
        metavar="FILE",
        help="write the workload to a .csv or .jsonl file (.csv.gz or .jsonl.gz: compressed)",
    )
    output.add_argument("--quiet", action="store_true", help="print no tables and no progress bar")
    synthetic_group = command.add_argument_group("synthetic workload (without TRACE)")
    synthetic_group.add_argument("--requests", type=int, metavar="N", help="number of requests (default: 3000)")
    synthetic_group.add_argument("--rate", type=float, metavar="N", help="mean arrivals per second (default: 5)")
    synthetic_group.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers (default: 0)")
    add_options(command)
    command.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    config = collect(faults, lambda: config_of(arguments), {option.field: option.flag for option in OPTIONS})
    cost = collect(faults, lambda: cost_of(arguments.cost), COST_FLAGS)
    workload = collect(faults, lambda: _workload(arguments), WORKLOAD_FLAGS if arguments.trace is None else {})
    collect(faults, lambda: _check_outputs(arguments))
    trace_bytes = None
    if arguments.write_trace is not None and workload is not None:
        trace_bytes = collect(faults, lambda: encode_trace(arguments.write_trace, workload))
    if faults or config is None or cost is None or workload is None:
        raise UsageError("\n".join(faults))

    tables = _tables_wanted(arguments)
    if tables:
        from neuron_sched.cli.tables import write_tables
    if arguments.scheduler == "mixed" and (
        unused := [option.flag for option in options_with_value(arguments) if not option.mixed]
    ):
        print_stderr(f"no effect with --scheduler mixed: {', '.join(unused)}")
    with progress_bar(len(workload)) if tables else nullcontext() as progress:
        try:
            result = replay(workload, config=config, cost=cost, scheduler=arguments.scheduler, progress=progress)
        except ValueError as error:
            raise UsageError(with_flags(error, COST_FLAGS)) from error
    if isinstance(cost, TableCost) and (
        extrapolated := _extrapolated(cost, result.summary, arguments.scheduler, config)
    ):
        print_stderr(f"extrapolated: {extrapolated} ({arguments.cost} ends there)")
    if trace_bytes is not None:
        _write(arguments.write_trace, trace_bytes)
    if arguments.json is not None:
        _write(arguments.json, result.to_json().encode())
    if tables:
        write_tables(result.summary, title=_title(arguments, len(workload)), settings=_settings(arguments, config))
    return _status(result.summary)


def _extrapolated(cost: TableCost, summary: Mapping[str, Any], scheduler: str, config: NeuronConfig) -> str:
    """Return text that names the step times beyond the last size of the profile, empty if there are none.

    The sizes are the padded sizes of the run. The mixed scheduler does not pad, so its sizes are the limits of a step.
    """
    padding = summary["padding"]
    largest = {kind: max(map(int, padding[kind]), default=0) for kind in ("prefill", "decode")}
    if scheduler == "mixed":
        largest = {"prefill": config.max_num_batched_tokens, "decode": config.max_num_seqs}
    last = {"prefill": max(cost.prefill), "decode": max(cost.decode)}
    units = {"prefill": "token", "decode": "row"}
    return ", ".join(
        f"{kind} times beyond {plural(last[kind], unit)}" for kind, unit in units.items() if largest[kind] > last[kind]
    )


def _workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    values = {"requests": arguments.requests, "rate_per_s": arguments.rate, "seed": arguments.seed}
    options = {name: value for name, value in values.items() if value is not None}
    if arguments.trace is None:
        return synthetic(**options)
    if options:
        names = ", ".join(WORKLOAD_FLAGS[name] for name in options)
        raise UsageError(f"{names}: expected no TRACE; only the synthetic workload has these options")
    trace = read_trace(arguments.trace, skip_bad=arguments.skip_bad)
    if trace.skipped:
        print_stderr(f"{plural(trace.skipped, 'row')} skipped")
    return trace


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Check that the output paths are writable before the run starts. Raise `UsageError` if one is not."""
    for option, name in (("--json", arguments.json), ("--write-trace", arguments.write_trace)):
        if name is None or (option == "--json" and name == "-"):
            continue
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"{option}: {name}: expected a file in an existing folder")
        if arguments.trace is not None and path.exists() and path.samefile(arguments.trace):
            raise UsageError(f"{option}: {name}: expected a file other than the trace")
    results, trace = arguments.json, arguments.write_trace
    if None not in (results, trace) and results != "-" and os.path.realpath(results) == os.path.realpath(trace):
        raise UsageError(f"--json, --write-trace: {trace}: expected two different files")


def _tables_wanted(arguments: argparse.Namespace) -> bool:
    """Return whether to write the tables. Raise `UsageError` if they need rich and no JSON file replaces them."""
    if arguments.quiet or arguments.json == "-":
        return False
    if find_spec("rich") is not None:
        return True
    advice = "the tables need rich: pip install rich"
    if arguments.json is None:
        raise UsageError(f"{advice}, or ask for --json")
    print_stderr(advice)
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
    return f"{workload}: {plural(requests, 'request')}"


def _settings(arguments: argparse.Namespace, config: NeuronConfig) -> list[str]:
    """Return the settings of the run as lines of text: scheduler and capacities, then step times."""
    blocks = f"{config.num_blocks:,} KV blocks of {plural(config.block_size, 'token')}"
    steps = f"{plural(config.max_num_batched_tokens, 'token')} a step"
    return [
        f"{arguments.scheduler} scheduler, {plural(config.max_num_seqs, 'slot')}, {steps}, {blocks}",
        f"step times: {arguments.cost}",
    ]


def _status(summary: Mapping[str, Any]) -> int:
    """Return the exit status, after printing the rejected requests."""
    rejections: list[dict[str, str]] = summary["rejections"]
    if not rejections:
        return 0
    total = summary["completed"] + len(rejections)
    print_stderr(f"{plural(len(rejections), 'request')} of {total:,} rejected:")
    for request in rejections[:REJECTIONS_PRINTED]:
        print_stderr(f"  {request['id']}: {request['reason']}")
    if len(rejections) > REJECTIONS_PRINTED:
        print_stderr(f"  and {len(rejections) - REJECTIONS_PRINTED:,} more")
    return EXIT_REJECTED
