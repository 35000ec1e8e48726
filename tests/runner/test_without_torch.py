"""`CompiledModel` without torch, and which modules the package imports early."""

import subprocess
import sys

import pytest

import neuron_sched
from neuron_sched import CompiledModel, NeuronConfig, ShapeError
from neuron_sched.runner import GraphReport, ModelReport

CONFIG = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "num_blocks": 8}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("backend", ["eager", "jit", "neuronx"])
def test_a_model_without_torch_raises_an_import_error(backend: str):
    message = python(
        "import sys; sys.modules['torch'] = None\n"
        "from neuron_sched import CompiledModel, NeuronConfig\n"
        f"config = NeuronConfig(**{CONFIG})\n"
        f"try: CompiledModel(lambda: 1 / 0, config, {backend!r})\n"
        "except ImportError as error: print(error)"
    )
    assert "CompiledModel needs torch" in message


def test_importing_the_package_does_not_import_torch():
    loaded = python("import sys, neuron_sched.runner; print(*sys.modules)").split()
    assert "neuron_sched.runner.backends.neuronx" in loaded
    assert {"torch", "torch_neuronx", "rich"} & set(loaded) == set()


def test_shape_error_is_a_value_error():
    assert issubclass(ShapeError, ValueError)
    assert ShapeError is neuron_sched.runner.ShapeError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "inductor"}, ValueError, "backend: 'inductor': expected one of 'eager', 'jit', 'neuronx'"),
        ({"backend": None}, ValueError, "backend: None: expected one of"),
        ({"compiler_args": "-O1"}, ValueError, "compiler_args: '-O1': expected None, because backend 'jit'"),
        ({"backend": "eager", "options": {"strict": False}}, ValueError, "options: {'strict': False}: expected none"),
        ({"options": [1]}, TypeError, "options: [1]: expected a dict"),
        ({"key": ""}, ValueError, "key: '': expected a string"),
        ({"key": 7}, TypeError, "key: 7: expected a string"),
        ({"cache_dir": "/somewhere"}, ValueError, "cache_dir: '/somewhere': expected None"),
        ({"config": CONFIG}, TypeError, "config: dict: expected a NeuronConfig"),
    ],
)
def test_invalid_arguments_are_refused_before_the_module_is_built(arguments: dict, error: type, message: str):
    with pytest.raises(error) as raised:
        CompiledModel(lambda: 1 / 0, **{"config": NeuronConfig(**CONFIG), **arguments})
    assert message in str(raised.value)


def test_a_report_is_formatted_as_a_table():
    report = ModelReport(
        "jit",
        {
            ("prefill", 128): GraphReport(seconds=1.234, cached=False, calls=3, real_tokens=288, padded_tokens=384),
            ("decode", 8, 4096): GraphReport(seconds=0.5, cached=True, calls=0, real_tokens=0, padded_tokens=0),
        },
    )
    assert (report.calls, report.real_tokens, report.padded_tokens) == (3, 288, 384)
    assert report.seconds == pytest.approx(1.734)
    assert report.unused == (("decode", 8, 4096),)
    assert [line.rstrip() for line in str(report).splitlines()] == [
        "graph                   made  seconds  calls  real  padded  padding",
        "prefill 128             jit      1.23      3   288     384   25.0 %",
        "decode 8, context 4096  read     0.50      0     0       0        -",
        "2 graphs, 1 never used           1.73      3   288     384   25.0 %",
    ]
