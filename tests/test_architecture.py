"""Imports go one way: core <- binding <- neuron_sched <- neuron_sched.vllm. Read from the sources of both languages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "rust/core"
BINDING = ROOT / "rust/python"
PACKAGE = ROOT / "python/neuron_sched"

# The core from bottom to top. A module imports from the layers below its own only, so there is no cycle,
# neighbours do not know each other, and the simulator and the advisor are known to nobody.
LAYERS = [
    {"error"},
    {"request", "decimal", "fixed_map"},
    {"bucket", "queue", "block_pool", "prefix"},
    {"config", "kv_cache"},
    {"ledger", "phase", "chunk"},
    {"step", "cost", "fill"},
    {"exclusive", "gate", "mixed", "worker"},
    {"sim"},
]
# They answer for the queue and the blocks of others too (those of vLLM), so they have none of their own.
DECISIONS = {"bucket", "ledger", "phase", "chunk"}
STATE = {"queue", "block_pool", "prefix", "kv_cache"}


def rust_code(path: Path) -> str:
    """The text without comments, strings and the test module at its end."""
    text = path.read_text().partition("#[cfg(test)]")[0]
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', "", text)


def rust_paths(code: str, root: str) -> set[str]:
    """The first names after `root::`, in paths and in `use root::{a, b::c}`."""
    found = set(re.findall(rf"\b{root}::(\w+)", code))
    for group in re.findall(rf"\b{root}::\{{(.*?)\}};", code, re.DOTALL):
        while "{" in group:
            group, before = re.sub(r"\{[^{}]*\}", "", group), group
            assert group != before, f"unreadable import: {before}"
        found |= {re.match(r"\s*(\w+)", name)[1] for name in group.split(",") if name.strip()}
    return found


def module_of(path: Path, source: Path) -> str:
    """The top-level module that a file belongs to."""
    return path.relative_to(source).parts[0].removesuffix(".rs")


def core_modules() -> dict[str, str]:
    """The code of every module of the core, its submodules included."""
    modules: dict[str, str] = {}
    for path in sorted((CORE / "src").rglob("*.rs")):
        name = module_of(path, CORE / "src")
        modules[name] = modules.get(name, "") + rust_code(path)
    assert len(modules) > 5, "no sources of the core were found"
    return modules


def python_imports(path: Path) -> list[tuple[str, bool]]:
    """Imported modules, and whether each import runs when the file itself is imported."""
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
        found += [(name, id(node) not in late) for name in names]
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def package_imports() -> dict[str, list[tuple[str, bool]]]:
    """Imports of every Python file of the package, by dotted name."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = python_imports(path)
    assert any(imports for imports in found.values()), "no imports of the package were found"
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_core_layers():
    modules = core_modules()
    modules.pop("lib")
    height = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    assert [name for name in modules if name not in height] == [], "give the module its place in LAYERS"
    edges = {(name, other) for name, code in modules.items() for other in rust_paths(code, "crate") - {name}}
    assert ("config", "bucket") in edges, "the known import was not read"
    assert sorted((a, b) for a, b in edges if height[b] >= height[a]) == []
    assert sorted((a, b) for a, b in edges if a in DECISIONS and b in STATE) == []


def test_core_reaches_for_nothing_outside():
    lib = (CORE / "src/lib.rs").read_text()
    assert "#![forbid(unsafe_code)]" in lib
    for name, code in core_modules().items():
        assert rust_paths(code, "std").isdisjoint({"io", "fs", "env", "time", "net", "process", "thread"}), name
        assert not re.search(r"RandomState|\bHash(Map|Set)::(new|with_capacity)\b", code), f"{name}: a random seed"
        assert not re.search(r"\b(pyo3|numpy)\b", code), name


def test_core_depends_on_no_crate():
    manifest = (CORE / "Cargo.toml").read_text()
    sections = re.findall(r"^\[(.+)\]$", manifest, re.MULTILINE)
    assert "package" in sections
    assert [name for name in sections if "dependencies" in name and name != "dev-dependencies"] == []


def test_binding_leaves_the_state_to_the_core():
    used = set()
    for path in (BINDING / "src").rglob("*.rs"):
        used |= rust_paths(rust_code(path), "neuron_sched_core")
    assert "error" in used, "no imports of the binding were found"
    assert used.isdisjoint(STATE)


def test_package_layers():
    for name, imports in package_imports().items():
        for imported, early in imports:
            commands = name in {"neuron_sched.cli", "neuron_sched.__main__"}
            assert commands or not within(imported, "neuron_sched.cli"), f"{name} imports cli"
            if within(name, "neuron_sched.vllm"):
                continue
            # The package itself may load its vLLM classes when somebody asks for them.
            late = name == "neuron_sched" and not early
            assert late or not within(imported, "neuron_sched.vllm"), f"{name} imports {imported}"
            top = imported.partition(".")[0]
            assert not early or top not in {"vllm", "torch", "torch_neuronx", "prometheus_client"}, name


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("use crate::error::{Error, Fault};", {"error"}),
        ("use crate::{bucket::{Buckets, common_divisor}, error::Error, request};", {"bucket", "error", "request"}),
        ("let unit = crate::bucket::common_divisor(buckets);", {"bucket"}),
    ],
)
def test_rust_paths_are_read(code: str, names: set[str]):
    assert rust_paths(code, "crate") == names
