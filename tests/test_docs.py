"""Every example that a reader sees is run: README, docs/, and the docstrings of the package and its stub."""

import ast
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import neuron_sched

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "python/neuron_sched").rglob("*.py*"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of the page's blocks in any of the languages."""
    text = page.read_text()
    found = [(text.count("\n", 0, match.start(2)), match) for match in BLOCK.finditer(text)]
    return [(line, match[2]) for line, match in found if match[1] in languages]


def commands(page: Path) -> list[str]:
    lines = "\n".join(text for _, text in blocks(page, "console", "sh", "bash")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?(neuron-sched|make)\b", line)]


def all_commands(program: str) -> list[str]:
    return [command for page in PAGES for command in commands(page) if shlex.split(command)[0] == program]


def run_doctest(text: str, names: dict, file: Path, line: int) -> int:
    """Runs the examples of `text`, which starts at `line` of `file`; returns how many there were."""
    test = doctest.DocTestParser().get_doctest(text, names, file.name, str(file), line)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=output.append, clear_globs=False)
    assert not output, "".join(output)
    return len(test.examples)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page are one program: a later one may use the names of an earlier one."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    found = blocks(page, "python")
    assert found or page.name != "README.md", "the README shows no Python"
    for line, text in found:
        if ">>>" in text:
            run_doctest(text, names, page, line)
        else:
            exec(compile("\n" * line + text, page, "exec"), names)


def test_docstring_examples():
    count = 0
    for path in SOURCES:
        if path.suffix not in {".py", ".pyi"}:
            continue
        module = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts).removesuffix(".__init__")
        names = {**vars(neuron_sched), **vars(importlib.import_module(module))}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                count += run_doctest(doc, names.copy(), path, node.body[0].lineno - 1)
    assert count, "no examples were found"


@pytest.mark.parametrize("command", all_commands("neuron-sched"))
def test_commands_run(command: str, tmp_path: Path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", command], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_commands_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {word for command in all_commands("make") for word in command.split()[1:] if re.fullmatch("[a-z-]+", word)}
    assert used, "no page names a make command"
    assert used <= targets
