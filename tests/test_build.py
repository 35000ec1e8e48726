"""Version, build information and public names of the installed package."""

import platform
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import neuron_sched

ROOT = Path(__file__).parent.parent


def test_version_equals_that_of_cargo():
    workspace = (ROOT / "Cargo.toml").read_text().partition("[workspace.package]")[2]
    version = re.search(r'^version = "(.+)"$', workspace, re.MULTILINE)
    assert neuron_sched.__version__ == version[1] == metadata.version("neuron-sched")


def test_build_info_has_profile_commit_and_target():
    info = neuron_sched.build_info()
    assert info.keys() == {"profile", "commit", "target"}
    assert info["profile"] in {"debug", "release"}
    assert info["commit"] is None or re.fullmatch("[0-9a-f]{40}", info["commit"])
    assert platform.machine().replace("arm64", "aarch64") in info["target"]


def test_build_info_returns_a_new_dict():
    neuron_sched.build_info().clear()
    assert neuron_sched.build_info()


def test_public_names_exist():
    assert [name for name in neuron_sched.__all__ if not hasattr(neuron_sched, name)] == []
    assert (resources.files(neuron_sched) / "py.typed").is_file()


def test_import_loads_no_optional_dependency():
    code = "import sys, neuron_sched; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "neuron_sched" in loaded
    assert {"vllm", "torch", "rich", "prometheus_client"}.isdisjoint(loaded)
