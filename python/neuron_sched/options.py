"""The fields of `NeuronConfig` as options of the command line: each defined once, checked by `NeuronConfig` only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from neuron_sched._native import NeuronConfig


def whole(text: str) -> object:
    """The number, or the text for `NeuronConfig` to complain about."""
    try:
        return int(text)
    except ValueError:
        return text


def number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def whole_list(text: str) -> object:
    return [whole(item.strip()) for item in text.split(",")] if text.strip() else []


def costs(text: str) -> object:
    """`128=17.1,2048=90` as {128: 17.1, 2048: 90.0}."""
    table = {}
    for item in text.split(","):
        size, equals, cost = item.partition("=")
        # Not a table: the text itself is then refused, with what is expected.
        if not equals or whole(size.strip()) in table:
            return text
        table[whole(size.strip())] = number(cost.strip())
    return table


@dataclass(frozen=True)
class Option:
    """One field: how its text is read, what stands for the value in the help, and the value when it is left out.

    Without a default of its own here, the field has the default of `NeuronConfig`.
    """

    field: str
    read: Callable[[str], object] | None
    """None for a switch."""
    placeholder: str
    help: str
    default: object = None
    mixed: bool = False
    """Whether the token-budget scheduler looks at it."""

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


OPTIONS = (
    Option("max_num_seqs", whole, "N", "most requests that run at once (slots)", 96, mixed=True),
    Option("max_num_batched_tokens", whole, "N", "most tokens of one step", 8192, mixed=True),
    Option("max_model_len", whole, "N", "longest sequence, prompt and output together", 16384, mixed=True),
    Option("block_size", whole, "N", "tokens of one KV block", 32, mixed=True),
    Option("num_blocks", whole, "N", "usable KV blocks", 8192, mixed=True),
    Option(
        "num_batched_tokens_buckets", whole_list, "N,N,...", "compiled prefill sizes (default: doubling from 128 up)"
    ),
    Option("num_seqs_buckets", whole_list, "N,N,...", "compiled decode batch sizes (default: doubling from 1 up)"),
    Option("decode_context_length_buckets", whole_list, "N,N,...", "compiled decode context lengths"),
    Option("kv_segment_size_buckets", whole_list, "N,N,...", "segment sizes where the device prefills in segments"),
    Option("max_prefills_per_batch", whole, "N", "most prompts that start in one step (default: 1)"),
    Option("kv_admission", str, "RULE", "how KV blocks are promised: reserve (default) or max_model_len"),
    Option(
        "max_consecutive_prefill_steps",
        whole,
        "N",
        "most prefill steps in a row while a decode is ready (default: no bound)",
    ),
    Option("min_decode_steps", whole, "N", "decode steps owed once that bound is hit (default: 1)"),
    Option("chunking", str, "PLAN", "how long prompts are cut: fixed (default) or bucket"),
    Option("prefill_cost", costs, "N=COST,...", "cost of each prefill size, for --chunking bucket"),
    Option("long_prefill_token_threshold", whole, "N", "cap on a chunk while others are there (default: 0, off)"),
    Option("prefix_caching", None, "", "share KV blocks of equal prompt beginnings (needs hash_ids in the trace)"),
    Option("policy", str, "NAME", "order of the waiting queue: fcfs (default) or priority"),
    Option("lookahead", whole, "N", "tokens beyond the next one for which KV slots are kept (default: 0)"),
    Option("dcp", whole, "N", "decode context parallel size (default: 1)"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field, under the title of the configuration."""
    group = parser.add_argument_group("configuration (the fields of NeuronConfig)")
    for option in OPTIONS:
        if option.read is None:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=option.help)
            continue
        default = f" (default: {option.default})" if option.default is not None else ""
        group.add_argument(
            option.flag,
            type=option.read,
            metavar=option.placeholder,
            default=option.default,
            help=option.help + default,
        )


def given(arguments: argparse.Namespace) -> list[Option]:
    """The options that have a value: from the command line, or a default of their own."""
    return [option for option in OPTIONS if getattr(arguments, option.field) is not None]


def config_of(arguments: argparse.Namespace) -> NeuronConfig:
    """The configuration that the options name; raises its ValueError, a line for each fault."""
    return NeuronConfig(**{option.field: getattr(arguments, option.field) for option in given(arguments)})
