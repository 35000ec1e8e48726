"""The package without vLLM, or with a broken one. Each test starts a process, because imported classes are cached."""

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = "import sys; sys.modules['vllm'] = None; import neuron_sched"


def python(code: str, path: Path | None = None) -> str:
    """Run the code in another process and return what it prints."""
    environment = {"PYTHONPATH": str(path)} if path else None
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["NeuronScheduler", "NeuronAsyncScheduler"])
def test_a_vllm_class_without_vllm_is_an_import_error(name: str):
    message = python(f"{HIDE}\ntry: neuron_sched.{name}\nexcept ImportError as error: print(error)")
    assert name in message
    assert "vLLM" in message
    assert "0.24" in message
    assert "\n" not in message


def test_other_public_names_work_without_vllm():
    assert python(f"{HIDE}; print(neuron_sched.NeuronConfig.__name__, 'NeuronScheduler' in dir(neuron_sched))")
    assert python("from neuron_sched import *; print('BucketScheduler' in globals())") == "True"


def test_an_unknown_name_is_an_attribute_error():
    assert python(f"{HIDE}; print(hasattr(neuron_sched, 'NeuronSchedule'))") == "False"


def test_a_broken_vllm_gives_its_own_import_error(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libmissing.so: cannot open shared object file')")
    message = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import neuron_sched\n"
        "try: neuron_sched.NeuronScheduler\n"
        "except ImportError as error:\n"
        "    while error: print(error); error = error.__cause__ or error.__context__"
    )
    assert "libmissing.so" in message
