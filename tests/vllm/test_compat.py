"""Names of vLLM's scheduler that `neuron_sched.vllm` uses, compared with the installed release, and the messages."""

import importlib
import inspect
import logging
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler

import neuron_sched
import neuron_sched.vllm
from neuron_sched.vllm import requirements
from tests.vllm.support.base_class_uses import Uses, find_uses
from tests.vllm.support.harness import build, request, run
from tests.vllm.support.release import RELEASE

CLASSES = {"NeuronScheduler": Scheduler, "NeuronAsyncScheduler": AsyncScheduler}
both = pytest.mark.parametrize("name", CLASSES)

# Parameters of the constructor. The subclasses name the first two and pass on all others; the engine names them all.
CONSTRUCTOR = ["vllm_config", "kv_cache_config", "structured_output_manager", "block_size"]

# Names that some releases lack, with the first or the last tested release that has them. Before it uses
# them, the package checks with `hasattr` or compares releases.
SINCE = {
    "_handle_blocked_waiting_request": (0, 32),
    "_holds_kv_blocks": (0, 32),
    "adaptive_long_prefill_threshold": (0, 32),
    "aux_output_connector": (0, 32),
    "deferred_waiting": (0, 32),
    "kv_holding_waiting": (0, 32),
    "last_prefill_step": (0, 33),
    "local_prefill_interval": (0, 33),
    "max_num_active_reqs": (0, 32),
    "num_executed_steps": (0, 33),
    "reset_preempted_req_ids": (0, 26),
}
UNTIL = {"_try_promote_blocked_waiting_request": (0, 30), "skipped_waiting": (0, 30)}


def flat(names: tuple[str | tuple[str, ...], ...]) -> set[str]:
    """Return all names in groups of alternatives."""
    return {name for group in names for name in ([group] if isinstance(group, str) else group)}


@pytest.fixture(scope="module")
def found() -> Uses:
    found = find_uses(Path(neuron_sched.vllm.__file__).parent)
    assert len(found.used) > 20, "too few uses were found"
    return found


@pytest.fixture(params=CLASSES.values(), ids=lambda cls: cls.__name__)
def stock(request: pytest.FixtureRequest) -> Scheduler:
    return build(request.param, async_scheduling=request.param is AsyncScheduler)


# Names


def test_the_constructor_has_the_parameters():
    parameters = inspect.signature(Scheduler.__init__).parameters
    assert [name for name in CONSTRUCTOR if name not in parameters] == []
    assert list(parameters)[1:3] == CONSTRUCTOR[:2]


def test_the_base_class_has_the_methods():
    assert requirements.missing(Scheduler, requirements.METHODS) == []
    assert [name for name in flat(requirements.METHODS) if not callable(getattr(Scheduler, name, print))] == []


def test_the_base_class_has_the_attributes(stock: Scheduler):
    assert requirements.missing(stock, requirements.ATTRIBUTES) == []


def test_the_base_class_has_the_names_of_its_release(stock: Scheduler):
    expected = {name for name, first in SINCE.items() if first <= RELEASE}
    expected |= {name for name, last in UNTIL.items() if last >= RELEASE}
    assert [name for name in sorted(expected) if not hasattr(stock, name)] == []


def test_every_used_name_is_listed(found: Uses):
    """If a release lacks a used name that is not listed, it fails in use instead of at start-up."""
    listed = flat(requirements.METHODS) | flat(requirements.ATTRIBUTES) | SINCE.keys() | UNTIL.keys()
    own = found.own_methods | found.own_attributes
    assert {name: sorted(where) for name, where in found.used.items() if name not in listed | own} == {}


def test_every_listed_name_is_used(found: Uses):
    listed = flat(requirements.METHODS) | flat(requirements.ATTRIBUTES) | SINCE.keys() | UNTIL.keys()
    assert sorted(listed - found.used.keys() - found.own_methods - found.strings) == []


def test_own_names_do_not_exist_in_the_base_class(found: Uses, stock: Scheduler):
    """Overrides are listed. Any other own name that the base class has too would replace the base class's."""
    overrides = flat(requirements.METHODS) | {"__init__"}
    assert sorted(name for name in found.own_methods - overrides if hasattr(stock, name)) == []
    assert sorted(name for name in found.own_attributes if hasattr(stock, name)) == []


# Parameters


@both
def test_overrides_take_the_parameters_of_the_base_class(name: str, found: Uses):
    cls, base = getattr(neuron_sched, name), CLASSES[name]
    for method in sorted(found.own_methods & flat(requirements.METHODS)):
        parameters = [*inspect.signature(getattr(base, method)).parameters.values()]
        signature = inspect.signature(getattr(cls, method))
        positional = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        signature.bind(*positional, **dict.fromkeys(keywords))
        # The engine may also pass all of them by name.
        named = [p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        try:
            signature.bind(**dict.fromkeys(named))
        except TypeError as error:
            pytest.fail(f"{method}{inspect.signature(getattr(base, method))}: {error}")


def test_calls_fit_the_signatures_of_the_base_class(found: Uses, stock: Scheduler):
    """The arguments of every call fit. Starred arguments are not checked."""
    checked = 0
    for method, calls in found.calls.items():
        bound_method = getattr(stock, method, None)
        for call in calls if inspect.ismethod(bound_method) else ():
            signature = inspect.signature(bound_method)
            bind = signature.bind_partial if call.starred else signature.bind
            checked += 1
            try:
                bind(*[None] * call.count, **dict.fromkeys(call.keywords))
            except TypeError as error:
                pytest.fail(f"{call.where}: {method}{signature}: {error}")
    assert checked > 5, "too few calls were found"


# Messages


@both
def test_a_release_outside_the_range_is_warned_about_once(name: str, monkeypatch: pytest.MonkeyPatch, caplog):
    cls = getattr(neuron_sched, name)
    releases = {"0.23.4": 1, "0.24.0": 0, "0.33.1rc2+cpu": 0, "0.34.0": 1, "1.0": 1, "dev": 1}
    for version, num_warnings in releases.items():
        monkeypatch.setattr(vllm, "__version__", version)
        caplog.clear()
        build(cls, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
        warnings = [r.getMessage() for r in caplog.records if "neuron_sched" in r.name and r.levelno >= logging.WARNING]
        assert len(warnings) == num_warnings, (version, warnings)
        assert all(text in warning for warning in warnings for text in [version, "0.24 to 0.33"])


@both
@pytest.mark.parametrize("group", requirements.METHODS, ids=str)
def test_a_release_without_a_method_is_refused(name: str, group, monkeypatch: pytest.MonkeyPatch):
    names = [group] if isinstance(group, str) else group
    if any(hasattr(SchedulerInterface, method) for method in names):
        pytest.skip("a method of vLLM's scheduler interface, which every scheduler has")
    for base in [Scheduler, AsyncScheduler]:
        for method in vars(base).keys() & set(names):
            monkeypatch.delattr(base, method)
    assert_refused(name, " or ".join(names))


@pytest.mark.parametrize("group", requirements.ATTRIBUTES, ids=str)
def test_a_release_without_an_attribute_is_refused(group, monkeypatch: pytest.MonkeyPatch):
    names = [group] if isinstance(group, str) else group
    original = Scheduler.__init__

    def init_without(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for attribute in names:
            vars(self).pop(attribute, None)
            # A property belongs to the class.
            for cls in type(self).__mro__:
                if attribute in vars(cls):
                    monkeypatch.delattr(cls, attribute)

    monkeypatch.setattr(Scheduler, "__init__", init_without)
    assert_refused("NeuronScheduler", " or ".join(names))


def assert_refused(name: str, missing: str):
    """Assert that the class refuses the installed vLLM, with a message that names what it lacks."""
    cls = getattr(neuron_sched, name)
    with pytest.raises(RuntimeError) as error:
        build(cls, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
    message = str(error.value)
    assert all(text in message for text in [f"lacks {missing}", vllm.__version__, "0.24 to 0.33"]), message


# The classes


@both
def test_the_public_names_are_the_classes_that_vllm_imports(name: str):
    cls = getattr(neuron_sched, name)
    assert cls is getattr(importlib.import_module("neuron_sched.vllm.scheduler"), name)
    assert issubclass(cls, CLASSES[name])
    assert issubclass(cls, neuron_sched.NeuronScheduler)


@both
def test_the_class_runs_a_request(name: str):
    cls = getattr(neuron_sched, name)
    sched = build(cls, max_num_batched_tokens=64, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
    if cls is neuron_sched.NeuronScheduler:
        assert run(sched, {0: [request("a", 100, 2)]}) == [{"a": 64}, {"a": 36}, {"a": 1}]
