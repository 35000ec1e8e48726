"""Command-line options for the fields of `NeuronConfig`, derived from `NeuronConfig.FIELDS`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from neuron_sched._native import ConfigField, NeuronConfig

DEFAULTS = {
    "max_num_seqs": 96,
    "max_num_batched_tokens": 8192,
    "max_model_len": 16384,
    "block_size": 32,
    "num_blocks": 8192,
}
"""Defaults of the command line for the required fields of `NeuronConfig`."""

MIXED = frozenset(DEFAULTS)
"""Fields that `--scheduler mixed` uses."""

NOTES = {"prefix_caching": "needs hash_ids in the trace"}
"""Additional help text for a field, where the command line needs more than the meaning of the field."""


def int_or_text(text: str) -> object:
    """Return the text as an integer, or unchanged if it is none: `NeuronConfig` then rejects it."""
    try:
        return int(text)
    except ValueError:
        return text


def float_or_text(text: str) -> object:
    """Return the text as a float, or unchanged if it is none: `NeuronConfig` then rejects it."""
    try:
        return float(text)
    except ValueError:
        return text


def int_list(text: str) -> object:
    """Return the items of a comma-separated list, each as in `int_or_text`."""
    return [int_or_text(item.strip()) for item in text.split(",")] if text.strip() else []


def cost_table(text: str) -> object:
    """Return `128=17.1,2048=90` as {128: 17.1, 2048: 90.0}, or the text unchanged if it is not such a table."""
    table = {}
    for item in text.split(","):
        size, equals, cost = item.partition("=")
        if not equals or int_or_text(size.strip()) in table:
            return text
        table[int_or_text(size.strip())] = float_or_text(cost.strip())
    return table


READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "count": (int_or_text, "N"),
    "sizes": (int_list, "N,N,..."),
    "choice": (str, "NAME"),
    "costs": (cost_table, "N=COST,..."),
}
"""For each kind of field, the function that reads the option's value and the placeholder in the help.

The kind `flag` is missing: its options take no value.
"""


@dataclass(frozen=True)
class Option:
    """The command-line option of one field."""

    declaration: ConfigField

    @property
    def field(self) -> str:
        """Name of the field."""
        return self.declaration.name

    @property
    def flag(self) -> str:
        """Name of the option, such as `--max-num-seqs`."""
        return "--" + self.field.replace("_", "-")

    @property
    def default(self) -> int | None:
        """Value if the option is absent. `None` leaves the default to `NeuronConfig`."""
        return DEFAULTS.get(self.field)

    @property
    def mixed(self) -> bool:
        """Whether `--scheduler mixed` uses the field."""
        return self.field in MIXED

    @property
    def help(self) -> str:
        """Help text: meaning, choices and default of the field."""
        meaning = self.declaration.meaning.replace("`", "").rstrip(".")
        if meaning[1].islower():
            meaning = meaning[0].lower() + meaning[1:]
        notes = [NOTES[self.field]] if self.field in NOTES else []
        if self.declaration.choices:
            notes.append(" or ".join(self.declaration.choices))
        notes.append(f"default: {self.declaration.default if self.default is None else self.default}")
        return f"{meaning} ({'; '.join(notes)})"


OPTIONS = tuple(Option(field) for field in NeuronConfig.FIELDS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `NeuronConfig`, in a group of its own."""
    group = parser.add_argument_group("configuration (the fields of NeuronConfig)")
    for option in OPTIONS:
        if option.declaration.kind == "flag":
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=option.help)
        else:
            read, placeholder = READERS[option.declaration.kind]
            group.add_argument(option.flag, type=read, metavar=placeholder, default=option.default, help=option.help)


def options_with_value(arguments: argparse.Namespace) -> list[Option]:
    """Return the options that have a value, from the command line or from `DEFAULTS`."""
    return [option for option in OPTIONS if getattr(arguments, option.field) is not None]


def config_of(arguments: argparse.Namespace) -> NeuronConfig:
    """Return the configuration. Raise `ValueError` with one line per fault if it is invalid."""
    return NeuronConfig(**{option.field: getattr(arguments, option.field) for option in options_with_value(arguments)})
