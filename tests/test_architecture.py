"""Imports go one way: core, binding, package, its vLLM classes. Inside each, components form layers: a component
imports from lower layers only, and no two modules import each other. docs/design.md describes the components."""

from __future__ import annotations

import re

import pytest

from tests.support.imports import (
    Crate,
    Graph,
    cycles,
    expanded,
    package_graph,
    package_imports,
    rust_paths,
    upward,
)
from tests.support.paths import ROOT

CORE = ROOT / "rust/core"
BINDING = ROOT / "rust/python"

# From bottom to top. A new component is listed here and has a line in docs/design.md.
CORE_LAYERS = [
    {"error"},
    {"request", "fixed_map"},
    {"queue"},
    {"config"},
    {"decide", "kv"},
    {"fill"},
    {"exclusive", "mixed", "worker"},
    {"sim"},
    {"lib"},
]
BINDING_LAYERS = [
    {"error", "guard"},
    {"convert"},
    {"config"},
    {"decide", "mixed", "sim"},
    {"exclusive"},
    {"fill"},
    {"worker"},
    {"lib"},
]
PACKAGE_LAYERS = [
    {"rows"},
    {"_native"},
    {"atomic", "config", "progress", "scheduler"},
    {"runner", "trace"},
    {"simulate", "vllm"},
    {"cli"},
    {"__main__"},
]
# The same objects decide for vLLM, which has a queue and KV blocks of its own.
STATE = {"queue", "kv"}


@pytest.fixture(scope="module")
def core() -> Crate:
    return Crate(CORE)


@pytest.fixture(scope="module")
def binding() -> Crate:
    return Crate(BINDING)


def components_of(graph: Graph) -> dict[str, str]:
    return {module: module.partition("::")[0] for module in graph}


def package_components(graph: Graph) -> dict[str, str]:
    return {module: [*module.split("."), "neuron_sched"][1] for module in graph}


def unplaced(layers: list[set[str]], component_of: dict[str, str]) -> set[str]:
    return set(component_of.values()) - set().union(*layers)


def test_the_core_has_layers_and_no_cycle(core: Crate):
    graph = core.graph()
    assert "config::bucket" in graph["config::rules"] and "kv" in graph["exclusive::scheduler"], "imports were not read"
    assert unplaced(CORE_LAYERS, components_of(graph)) == set(), "add the component to CORE_LAYERS"
    assert cycles(graph) == []
    assert upward(graph, CORE_LAYERS, components_of(graph)) == []


def test_the_binding_has_layers_and_no_cycle(binding: Crate):
    graph = binding.graph()
    assert "exclusive::batch_ids" in graph["exclusive::step"], "imports were not read"
    assert unplaced(BINDING_LAYERS, components_of(graph)) == set(), "add the component to BINDING_LAYERS"
    assert cycles(graph) == []
    assert upward(graph, BINDING_LAYERS, components_of(graph)) == []


def test_the_package_has_layers_and_no_cycle():
    graph = package_graph()
    # Loads the vLLM classes when they are asked for; tests below check that nothing else does.
    graph["neuron_sched"] -= {"neuron_sched.vllm", "neuron_sched.vllm.scheduler"}
    assert "neuron_sched.runner.shape" in graph["neuron_sched.runner.compiled"], "imports were not read"
    layers = [*PACKAGE_LAYERS, {"neuron_sched"}]
    assert unplaced(layers, package_components(graph)) == set(), "add the component to PACKAGE_LAYERS"
    assert cycles(graph) == []
    assert upward(graph, layers, package_components(graph)) == []


def test_decisions_own_no_queue_and_no_blocks(core: Crate):
    graph = core.graph()
    targets = {target for module, found in graph.items() if module.startswith("decide") for target in found}
    assert {target.partition("::")[0] for target in targets}.isdisjoint(STATE)


def test_the_core_reaches_for_nothing_outside(core: Crate):
    assert "#![forbid(unsafe_code)]" in (CORE / "src/lib.rs").read_text()
    outside = {"io", "fs", "env", "time", "net", "process", "thread"}
    for name, code in core.code.items():
        std = {path.split("::")[1] for path in rust_paths(code) if path.startswith("std::")}
        assert std.isdisjoint(outside), name
        assert not re.search(r"RandomState|\bHash(Map|Set)::(new|with_capacity)\b", code), f"{name}: a random seed"
        assert not re.search(r"\b(pyo3|numpy)\b", code), name


def test_the_core_depends_on_no_crate():
    manifest = (CORE / "Cargo.toml").read_text()
    sections = re.findall(r"^\[(.+)\]$", manifest, re.MULTILINE)
    assert "package" in sections
    assert [name for name in sections if "dependencies" in name and name != "dev-dependencies"] == []


def test_the_binding_leaves_the_state_to_the_core(binding: Crate):
    paths = {path for code in binding.code.values() for path in rust_paths(code)}
    used = {path.split("::")[1] for path in paths if path.startswith("neuron_sched_core::")}
    assert "error" in used, "no imports of the binding were found"
    # The name of a policy is a configuration value.
    assert {path for path in paths if re.match(r"neuron_sched_core::(queue|kv)\b", path)} <= {
        "neuron_sched_core::queue::Policy"
    }


def test_optional_packages_are_imported_when_they_are_used():
    optional = {"vllm", "torch", "torch_neuronx", "rich", "prometheus_client"}
    for name, imports in package_imports().items():
        if name.startswith("neuron_sched.vllm"):
            continue
        early = {found.name.partition(".")[0] for found in imports if found.early}
        allowed = {"rich"} if name in {"neuron_sched.progress", "neuron_sched.cli.tables"} else set()
        assert early & optional <= allowed, name


def test_only_the_package_itself_loads_the_vllm_classes():
    for name, imports in package_imports().items():
        if name.startswith("neuron_sched.vllm"):
            continue
        found = [found for found in imports if found.name.startswith("neuron_sched.vllm")]
        assert not found or name == "neuron_sched", name
        assert not any(one.early for one in found), name


@pytest.mark.parametrize(
    ("use", "paths"),
    [
        ("crate::error::Error", ["crate::error::Error"]),
        ("crate::error::{Error, Fault}", ["crate::error::Error", "crate::error::Fault"]),
        (
            "crate::{config::{Buckets, common_divisor}, request}",
            [
                "crate::config::Buckets",
                "crate::config::common_divisor",
                "crate::request",
            ],
        ),
        ("neuron_sched_core::sim::{self, Arrival}", ["neuron_sched_core::sim", "neuron_sched_core::sim::Arrival"]),
    ],
)
def test_groups_of_imports_are_written_out(use: str, paths: list[str]):
    assert list(expanded(use)) == paths


def test_paths_in_code_are_read():
    code = "use super::phase::{Kind, Phase};\nlet unit = crate::config::common_divisor(buckets);"
    assert rust_paths(code) >= {"super::phase::Kind", "super::phase::Phase", "crate::config::common_divisor"}


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_upward_imports_are_found():
    layers = [{"low"}, {"high"}]
    graph = {"low::x": {"high::y"}, "high::y": {"low::x"}}
    assert upward(graph, layers, components_of(graph)) == [("low::x", "high::y")]
