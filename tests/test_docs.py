"""Examples in README, docs/ and the docstrings of the package and its stub are run, and links and names are checked.

The Python examples of docs/vllm.md need vLLM, and those of docs/runner.md need torch: tests/vllm/test_docs.py and
tests/runner/test_docs.py run them.
"""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import neuron_sched
from tests.support.doctests import run_blocks, run_doctest
from tests.support.pages import NEEDS_TORCH, NEEDS_VLLM, PAGES, STANDALONE, anchors, commands, table
from tests.support.paths import ROOT

SOURCES = sorted((ROOT / "python/neuron_sched").rglob("*.py*"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in {NEEDS_VLLM, NEEDS_TORCH}], ids=lambda page: page.name
)
def test_python_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page form one program: a block may use the names of the blocks before it."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    run_blocks(page, names)


def names_within(path: Path) -> dict:
    """Return the names that an example in the file may use: the public names, and all names of its module."""
    module = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts).removesuffix(".__init__")
    own = {} if path.stem == "__main__" else vars(importlib.import_module(module))
    return {**vars(neuron_sched), **own}


def is_documented(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))


def test_docstring_examples_run():
    count = 0
    for path in SOURCES:
        if path.suffix not in {".py", ".pyi"}:
            continue
        module = ast.parse(path.read_text())
        if not any(">>>" in (ast.get_docstring(node) or "") for node in ast.walk(module) if is_documented(node)):
            continue
        names = names_within(path)
        for node in ast.walk(module):
            if is_documented(node) and (doc := ast.get_docstring(node)):
                count += run_doctest(doc, names.copy(), path, node.body[0].lineno - 1)
    assert count, "no examples were found"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "neuron-sched")], ids=lambda page: page.name)
def test_commands_of_a_page_run(page: Path, tmp_path: Path):
    """The commands of a page form one session: a command may read the files of the commands before it."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("COLUMNS", None)
    for command, expected in commands(page, "neuron-sched"):
        done = subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if expected:
            # "..." stands for any text, which may span several lines.
            assert doctest.OutputChecker().check_output(expected, done.stdout, doctest.ELLIPSIS), (
                f"{command}\n{done.stdout}"
            )


def test_make_commands_of_the_pages_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    calls = [command for page in PAGES for command, _ in commands(page, "make")]
    used = {word for command in calls for word in command.split()[1:] if re.fullmatch("[a-z-]+", word)}
    assert used, "no page names a make command"
    assert used <= targets


def described(node: ast.ClassDef | ast.Module, owner: object) -> Iterator[tuple[str, str, str]]:
    """Yield each public name of the class or module, its docstring in the stub and at run time, each as one line."""
    for item in node.body:
        if isinstance(item, (ast.ClassDef, ast.FunctionDef)) and not item.name.startswith("_"):
            if any(ast.unparse(decorator) == "type_check_only" for decorator in item.decorator_list):
                continue
            live = getattr(owner, item.name)
            texts = (ast.get_docstring(item) or "", live.__doc__ or "")
            # Only the docstrings in Rust have backticks around exceptions.
            stub, built = (" ".join(text.replace("`", "").split()) for text in texts)
            yield getattr(live, "__qualname__", item.name), stub, built
            if isinstance(item, ast.ClassDef):
                yield from described(item, live)


def test_docstrings_of_the_stub_begin_with_those_of_the_module():
    """`help()` reads the built module, and an editor reads the stub."""
    stub = ast.parse((ROOT / "python/neuron_sched/_native.pyi").read_text())
    found = list(described(stub, neuron_sched._native))
    assert {"BucketScheduler.schedule", "Scheduler", "fit"} & {name for name, _, _ in found}
    wrong = [entry for entry in found if not entry[2] or not entry[1].startswith(entry[2])]
    assert wrong == []


def test_every_public_name_has_a_docstring():
    public = [getattr(neuron_sched, name) for name in neuron_sched.__all__ if not name.startswith("__")]
    members = [
        (owner, name, member)
        for owner in public
        if isinstance(owner, type)
        for name, member in vars(owner).items()
        if not name.startswith("_")
    ]
    assert members
    assert [owner.__name__ for owner in public if not owner.__doc__] == []
    # The docstring of a dataclass describes its fields.
    fields = {(owner, name) for owner in public for name in getattr(owner, "__dataclass_fields__", ())}
    described_fields = {(owner, name) for owner, name in fields if f"`{name}`" in owner.__doc__}
    assert fields - described_fields == set()
    undocumented = [(owner, name) for owner, name, member in members if not member.__doc__]
    assert [f"{owner.__name__}.{name}" for owner, name in undocumented if (owner, name) not in fields] == []


def test_links_to_pages_and_headings_have_a_target():
    found = 0
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            to = (page.parent / file).resolve() if file else page
            assert to.exists(), f"{page.name}: {target}"
            found += 1
            if anchor:
                assert anchor in anchors(to), f"{page.name}: {target}"
    assert found > 10


def test_every_wait_reason_is_explained():
    """The pages list the reasons of the core, in its order. Two of them exist under vLLM only."""
    ledger = (ROOT / "rust/core/src/decide/ledger.rs").read_text()
    names = re.findall(r'^ +Self::\w+ => "(\w+)",$', ledger, re.MULTILINE)
    assert len(names) == 10
    explained = {page: [name.strip("`") for (name,) in table(page, "reason")] for page in (STANDALONE, NEEDS_VLLM)}
    assert explained[NEEDS_VLLM] == names
    assert explained[STANDALONE] == [name for name in names if name not in {"paused", "blocked"}]
