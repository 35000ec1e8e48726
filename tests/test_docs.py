"""Every example that a reader sees is run: README, docs/, and the docstrings of the package and its stub.

The Python of docs/vllm.md needs vLLM, that of docs/runner.md torch: tests/test_vllm_docs.py and
tests/test_torch_docs.py run it.
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

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_VLLM = ROOT / "docs/vllm.md"
NEEDS_TORCH = ROOT / "docs/runner.md"
# A block of another page that imports vLLM is run by tests/test_vllm_*.py.
NEEDS_VLLM_TOO = re.compile(r"^from vllm", re.MULTILINE)
SOURCES = sorted((ROOT / "python/neuron_sched").rglob("*.py*"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of the page's blocks in any of the languages."""
    text = page.read_text()
    found = [(text.count("\n", 0, match.start(2)), match) for match in BLOCK.finditer(text)]
    return [(line, match[2]) for line, match in found if match[1] in languages]


def commands(page: Path, program: str) -> list[tuple[str, str]]:
    """Each call of the program on the page, and the output that is shown below it, if any."""
    found: list[tuple[str, str]] = []
    for _, text in blocks(page, "console", "sh", "bash"):
        shown = False
        for line in text.replace("\\\n", " ").splitlines(keepends=True):
            if line.startswith("$ ") or not text.startswith("$ "):
                command = line.removeprefix("$ ").strip()
                shown = re.match(rf"{program}\b", command) is not None
                if shown:
                    found.append((command, ""))
            elif shown:
                found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def table(page: Path, *header: str) -> list[list[str]]:
    """The rows of the page's table whose first columns have these names: those columns."""
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if cells(line)[: len(header)] == list(header):
            next(lines)  # the rule below the names
            return [cells(row)[: len(header)] for row in iter(lambda: next(lines), "")]
    raise AssertionError(f"{page.name} has no table {header}")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def run_doctest(text: str, names: dict, file: Path, line: int) -> int:
    """Runs the examples of `text`, which starts at `line` of `file`; returns how many there were.

    What they define is added to `names`.
    """
    test = doctest.DocTestParser().get_doctest(text, names, file.name, str(file), line)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=output.append, clear_globs=False)
    names.update(test.globs)  # doctest works on a copy
    assert not output, "".join(output)
    return len(test.examples)


def run_blocks(page: Path, names: dict) -> None:
    """Runs the blocks of a page but those that import vLLM, one after the other."""
    found = [(line, text) for line, text in blocks(page, "python") if not NEEDS_VLLM_TOO.search(text)]
    assert found or page.name != "README.md", "the README shows no Python"
    for line, text in found:
        if ">>>" in text:
            run_doctest(text, names, page, line)
        else:
            exec(compile("\n" * line + text, page, "exec"), names)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in {NEEDS_VLLM, NEEDS_TORCH}], ids=lambda page: page.name
)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page are one program: a later one may use the names of an earlier one."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    run_blocks(page, names)


def names_within(path: Path) -> dict:
    """What an example in the file may use: the public names of the package, and all of its own module."""
    module = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts).removesuffix(".__init__")
    own = {} if path.stem == "__main__" else vars(importlib.import_module(module))
    return {**vars(neuron_sched), **own}


def is_documented(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))


def test_docstring_examples():
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
def test_commands_run(page: Path, tmp_path: Path):
    """The commands of a page are one session: a later one may read what an earlier one wrote."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("COLUMNS", None)
    for command, shown in commands(page, "neuron-sched"):
        done = subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if shown:
            # "..." stands for anything, over several lines too.
            assert doctest.OutputChecker().check_output(shown, done.stdout, doctest.ELLIPSIS), (
                f"{command}\n{done.stdout}"
            )


def test_make_commands_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    calls = [command for page in PAGES for command, _ in commands(page, "make")]
    used = {word for command in calls for word in command.split()[1:] if re.fullmatch("[a-z-]+", word)}
    assert used, "no page names a make command"
    assert used <= targets


def described(node: ast.ClassDef | ast.Module, owner: object) -> Iterator[tuple[str, str, str]]:
    """Name, stub docstring and docstring at run time of each public name in the class or module, each on one line."""
    for item in node.body:
        if isinstance(item, (ast.ClassDef, ast.FunctionDef)) and not item.name.startswith("_"):
            if any(ast.unparse(decorator) == "type_check_only" for decorator in item.decorator_list):
                continue
            live = getattr(owner, item.name)
            texts = (ast.get_docstring(item) or "", live.__doc__ or "")
            # Names of exceptions are marked in Rust only.
            stub, built = (" ".join(text.replace("`", "").split()) for text in texts)
            yield getattr(live, "__qualname__", item.name), stub, built
            if isinstance(item, ast.ClassDef):
                yield from described(item, live)


def test_help_says_what_the_stub_says():
    """`help()` reads the built module, an editor the stub: the first begins the second."""
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
    # The fields of a dataclass are told in its own docstring.
    fields = {(owner, name) for owner in public for name in getattr(owner, "__dataclass_fields__", ())}
    told = {(owner, name) for owner, name in fields if f"`{name}`" in owner.__doc__}
    assert fields - told == set()
    undocumented = [(owner, name) for owner, name, member in members if not member.__doc__]
    assert [f"{owner.__name__}.{name}" for owner, name in undocumented if (owner, name) not in fields] == []


def test_every_field_of_the_configuration_has_a_section():
    config = neuron_sched.NeuronConfig(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, block_size=1, num_blocks=1
    )
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(config.as_dict())


def test_links_lead_somewhere():
    """Links from page to page, and to headings."""
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


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub forms them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_reason_is_explained():
    """The core's names, in its order; two are of vLLM only."""
    ledger = (ROOT / "rust/core/src/ledger.rs").read_text()
    names = re.findall(r'^ +Self::\w+ => "(\w+)",$', ledger, re.MULTILINE)
    assert len(names) == 10
    explained = {page: [name.strip("`") for (name,) in table(page, "reason")] for page in (PAGES[0], NEEDS_VLLM)}
    assert explained[NEEDS_VLLM] == names
    assert explained[PAGES[0]] == [name for name in names if name not in {"paused", "blocked"}]
