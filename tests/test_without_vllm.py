"""The package where vLLM is absent or broken. Each test is a process of its own: classes once found stay."""

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = "import sys; sys.modules['vllm'] = None; import neuron_sched"


def python(code: str, path: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(path)} if path else None
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["NeuronScheduler", "NeuronAsyncScheduler"])
def test_a_class_without_vllm_is_an_import_error(name: str):
    told = python(f"{HIDE}\ntry: neuron_sched.{name}\nexcept ImportError as error: print(error)")
    assert name in told
    assert "vLLM" in told
    assert "0.24" in told
    assert "\n" not in told


def test_the_rest_works_without_vllm():
    assert python(f"{HIDE}; print(neuron_sched.NeuronConfig.__name__, 'NeuronScheduler' in dir(neuron_sched))")
    assert python("from neuron_sched import *; print('BucketScheduler' in globals())") == "True"


def test_other_names_are_attribute_errors():
    assert python(f"{HIDE}; print(hasattr(neuron_sched, 'NeuronSchedule'))") == "False"


def test_a_vllm_that_cannot_be_imported_is_not_called_absent(tmp_path: Path):
    """Its own error is what has to be mended."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libgone.so: cannot open shared object file')")
    told = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import neuron_sched\n"
        "try: neuron_sched.NeuronScheduler\n"
        "except ImportError as error:\n"
        "    while error: print(error); error = error.__cause__ or error.__context__"
    )
    assert "libgone.so" in told
