"""A configuration field is declared once, in rust/core/src/config/fields.rs. Whatever is written by hand beside the
declaration, for readers and type checkers, is compared with it here."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from neuron_sched.cli.options import DEFAULTS, OPTIONS
from neuron_sched.config import ConfigField, NeuronConfig
from tests.support.pages import table

ROOT = Path(__file__).parents[2]
STUB = ROOT / "python/neuron_sched/_native.pyi"
PAGE = ROOT / "docs/configuration.md"

NAMES = [field.name for field in NeuronConfig.FIELDS]
REQUIRED = {field.name for field in NeuronConfig.FIELDS if field.required}


@pytest.fixture(scope="module")
def stub() -> dict[str, ast.FunctionDef]:
    """The methods of `NeuronConfig` in the stub, by name."""
    classes = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)}
    return {node.name: node for node in classes["NeuronConfig"].body if isinstance(node, ast.FunctionDef)}


def test_the_declaration_was_read():
    assert len(NAMES) == len(set(NAMES)) >= 20
    assert {"max_num_seqs", "num_blocks"} <= REQUIRED


def test_every_field_is_an_entry_of_as_dict():
    config = NeuronConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, block_size=1, num_blocks=1)
    assert list(config.as_dict()) == NAMES


def test_every_field_is_a_parameter():
    parameters = inspect.signature(NeuronConfig).parameters
    assert list(parameters) == NAMES
    assert {name for name, parameter in parameters.items() if parameter.default is parameter.empty} == REQUIRED


def test_every_field_is_a_parameter_of_the_stub(stub: dict[str, ast.FunctionDef]):
    arguments = stub["__new__"].args
    assert [argument.arg for argument in arguments.kwonlyargs] == NAMES
    without = {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None}
    assert without == REQUIRED


def test_every_field_is_a_property_of_the_stub(stub: dict[str, ast.FunctionDef]):
    properties = [name for name, node in stub.items() if any("property" in ast.unparse(d) for d in node.decorator_list)]
    assert properties == NAMES


@pytest.mark.parametrize("field", NeuronConfig.FIELDS, ids=NAMES)
def test_the_meaning_is_the_first_line_of_each_docstring(field: ConfigField, stub: dict[str, ast.FunctionDef]):
    assert (ast.get_docstring(stub[field.name]) or "").partition("\n\n")[0].replace("\n", " ") == field.meaning
    assert inspect.getdoc(getattr(NeuronConfig, field.name)) == field.meaning


@pytest.mark.parametrize("field", NeuronConfig.FIELDS, ids=NAMES)
def test_a_meaning_is_one_sentence(field: ConfigField):
    assert re.fullmatch(r"[A-Z][^\n]*[^.]\.", field.meaning)


def row(field: ConfigField) -> list[str]:
    """The row of the page's table."""
    values = {
        "count": f"a whole number from {field.minimum}",
        "sizes": "a list of sizes",
        "choice": " or ".join(f'`"{choice}"`' for choice in field.choices),
        "flag": "True or False",
        "costs": "a dict {tokens: cost}",
    }
    return [f"[`{field.name}`](#{field.name})", values[field.kind], field.default or "required", field.meaning]


def test_every_field_is_in_the_table_of_the_page():
    expected = [row(field) for field in NeuronConfig.FIELDS]
    as_text = "\n".join(f"| {' | '.join(cells)} |" for cells in expected)
    assert table(PAGE, "field", "values", "default", "meaning") == expected, f"expected the rows\n{as_text}"


def test_every_field_has_a_section_on_the_page():
    assert sorted(re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)) == sorted(NAMES)


def test_every_field_is_an_option_of_the_command_line():
    assert [option.field for option in OPTIONS] == NAMES
    assert set(DEFAULTS) == REQUIRED, "the command line gives every required field a value"


def test_every_field_has_one_source_under_vllm():
    sources = [field.vllm_flag or field.name for field in NeuronConfig.FIELDS]
    assert len(set(sources)) == len(sources)
