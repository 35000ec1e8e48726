"""The import graph of each language, read from the sources: modules, and the modules that each one imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "python/neuron_sched"

Graph = dict[str, set[str]]
"""Imported modules by module. Every module is a key."""


@dataclass(frozen=True)
class Crate:
    """The modules of a Rust crate, named by their path: `exclusive`, `exclusive::plan`."""

    folder: Path
    code: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        source = self.folder / "src"
        code = {module_name(path, source): rust_code(path) for path in sorted(source.rglob("*.rs"))}
        assert len(code) > 5, f"no sources were found in {source}"
        object.__setattr__(self, "code", code)

    def graph(self) -> Graph:
        """Imports between the modules. A facade (`exclusive`) lists its modules, which counts as importing them."""
        return {module: set(self._imports(module, code)) - {module} for module, code in self.code.items()}

    def _imports(self, module: str, code: str) -> Iterator[str]:
        parents = module.split("::")[:-1] if module != "lib" else []
        for path in rust_paths(code):
            parts = path.split("::")
            if parts[0] == "crate":
                yield from self._longest(parts[1:])
            elif parts[0] == "super":
                depth = parts.count("super")
                base = parents[: len(parents) - depth + 1] if module != "lib" else []
                # `super::super` in a test module is the file's own `super`; tests are not read.
                yield from self._longest([*base, *parts[depth:]]) if parts[depth:] else ()
        if module != "lib":
            yield from (
                f"{module}::{child}" for child in re.findall(r"^(?:pub(?:\(crate\))? )?mod (\w+);", code, re.MULTILINE)
            )

    def _longest(self, parts: list[str]) -> Iterator[str]:
        for end in range(len(parts), 0, -1):
            if (name := "::".join(parts[:end])) in self.code:
                yield name
                return


def module_name(path: Path, source: Path) -> str:
    return "::".join(path.relative_to(source).with_suffix("").parts)


def rust_code(path: Path) -> str:
    """The text without comments, strings and the test module at its end."""
    text = path.read_text().partition("#[cfg(test)]")[0]
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', "", text)


def rust_paths(code: str) -> set[str]:
    """Paths that begin with `crate`, `super` or another crate's name, with the groups of `use` written out."""
    found = set()
    for use in re.findall(r"\buse ([\w:]+(?:::\{.*?\})?)(?: as \w+)?;", code, re.DOTALL):
        found |= set(expanded(use))
    found |= set(re.findall(r"(?<![\w:])((?:crate|super|neuron_sched_core|std)(?:::\w+)+)", code))
    return {re.sub(r"\s+", "", path) for path in found}


def expanded(use: str) -> Iterator[str]:
    """Write out `a::{b, c::{d, e}}` as `a::b`, `a::c::d`, `a::c::e`."""
    head, brace, rest = use.partition("{")
    if not brace:
        yield head.strip().removesuffix("::self").partition(" as ")[0]
        return
    depth, item = 0, ""
    for char in rest[: rest.rindex("}")] + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if item.strip():
                yield from expanded(head.strip() + item.strip())
            item = ""
        else:
            item += char


@dataclass(frozen=True)
class PythonImport:
    """One imported name, and whether the import runs when the importing file is imported."""

    name: str
    early: bool


def python_imports(path: Path) -> list[PythonImport]:
    """Imports of a file, those in functions and under TYPE_CHECKING included."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(outer)
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [PythonImport(name, id(node) not in late) for name in names]
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def package_imports() -> dict[str, list[PythonImport]]:
    """Imports of every file of the package, by module."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = python_imports(path)
    assert any(imports for imports in found.values()), "no imports of the package were found"
    return found


def package_graph() -> Graph:
    """Imports between the modules of the package."""
    imports = package_imports()

    def module(name: str) -> str | None:
        """The longest part of a dotted name that is a module; the package itself only if it is named alone."""
        parts = name.split(".")
        candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((candidate for candidate in candidates if candidate in imports), None)

    return {
        name: {target for found in names if (target := module(found.name)) is not None} - {name}
        for name, names in imports.items()
    }


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or not, each sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def upward(graph: Graph, layers: list[set[str]], component_of: dict[str, str]) -> list[tuple[str, str]]:
    """Imports between layers that do not lead to a lower layer."""
    height = {component: i for i, layer in enumerate(layers) for component in layer}
    return sorted(
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if component_of[name] != component_of[target] and height[component_of[target]] >= height[component_of[name]]
    )
