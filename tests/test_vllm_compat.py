"""Does the vLLM that is installed have what our classes use? Every difference is named; and what users are told."""

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
from neuron_sched.vllm import compat
from vllm_harness import RELEASE, build, request, run
from vllm_uses import Uses, uses

CLASSES = {"NeuronScheduler": Scheduler, "NeuronAsyncScheduler": AsyncScheduler}
both = pytest.mark.parametrize("name", CLASSES)

# The constructor of ours names the first two and hands on all others; the engine gives them all by name.
CONSTRUCTOR = ["vllm_config", "kv_cache_config", "structured_output_manager", "block_size"]

# What some releases lack and is asked for by `hasattr` or where the release is known: the first, or the last, tested
# release that has it.
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
    return {name for group in names for name in ([group] if isinstance(group, str) else group)}


@pytest.fixture(scope="module")
def found() -> Uses:
    found = uses(Path(neuron_sched.vllm.__file__).parent)
    assert len(found.used) > 20, "no uses were found"
    return found


@pytest.fixture(params=CLASSES.values(), ids=lambda cls: cls.__name__)
def stock(request: pytest.FixtureRequest) -> Scheduler:
    return build(request.param, async_scheduling=request.param is AsyncScheduler)


# Drift: the names


def test_constructor():
    parameters = inspect.signature(Scheduler.__init__).parameters
    assert [name for name in CONSTRUCTOR if name not in parameters] == []
    assert list(parameters)[1:3] == CONSTRUCTOR[:2]


def test_methods():
    assert compat.missing(Scheduler, compat.METHODS) == []
    assert [name for name in flat(compat.METHODS) if not callable(getattr(Scheduler, name, print))] == []


def test_attributes(stock: Scheduler):
    assert compat.missing(stock, compat.ATTRIBUTES) == []


def test_names_of_some_releases(stock: Scheduler):
    expected = {name for name, first in SINCE.items() if first <= RELEASE}
    expected |= {name for name, last in UNTIL.items() if last >= RELEASE}
    assert [name for name in sorted(expected) if not hasattr(stock, name)] == []


def test_every_use_is_listed(found: Uses):
    """A name that the sources use but no list has would be noticed by users of the release that lacks it."""
    listed = flat(compat.METHODS) | flat(compat.ATTRIBUTES) | SINCE.keys() | UNTIL.keys()
    own = found.methods | found.attributes
    assert {name: sorted(where) for name, where in found.used.items() if name not in listed | own} == {}


def test_everything_listed_is_used(found: Uses):
    listed = flat(compat.METHODS) | flat(compat.ATTRIBUTES) | SINCE.keys() | UNTIL.keys()
    assert sorted(listed - found.used.keys() - found.methods - found.strings) == []


def test_no_name_of_ours_is_taken(found: Uses, stock: Scheduler):
    """What we override is listed; any other name of ours that the base has too means something else there."""
    overrides = flat(compat.METHODS) | {"__init__"}
    assert sorted(name for name in found.methods - overrides if hasattr(stock, name)) == []
    assert sorted(name for name in found.attributes if hasattr(stock, name)) == []


# Drift: the parameters


@both
def test_overrides_take_what_the_base_takes(name: str, found: Uses):
    ours, base = getattr(neuron_sched, name), CLASSES[name]
    for method in sorted(found.methods & flat(compat.METHODS)):
        wanted = [*inspect.signature(getattr(base, method)).parameters.values()]
        takes = inspect.signature(getattr(ours, method))
        positional = [p.name for p in wanted if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
        keywords = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
        takes.bind(*positional, **dict.fromkeys(keywords))
        # The engine may also give all of them by name.
        named = [p.name for p in wanted if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        try:
            takes.bind(**dict.fromkeys(named))
        except TypeError as error:
            pytest.fail(f"{method}{inspect.signature(getattr(base, method))}: {error}")


def test_calls_of_the_base_fit(found: Uses, stock: Scheduler):
    """Counts and keywords of our calls, where no stars hide them."""
    checked = 0
    for method, calls in found.calls.items():
        live = getattr(stock, method, None)
        for call in calls if inspect.ismethod(live) else ():
            bind = inspect.signature(live).bind_partial if call.open else inspect.signature(live).bind
            checked += 1
            try:
                bind(*[None] * call.count, **dict.fromkeys(call.keywords))
            except TypeError as error:
                pytest.fail(f"{call.where}: {method}{inspect.signature(live)}: {error}")
    assert checked > 5, "no calls were found"


# What is told


@both
def test_a_release_outside_the_range_is_told_once(name: str, monkeypatch: pytest.MonkeyPatch, caplog):
    cls = getattr(neuron_sched, name)
    for version, told in [("0.23.4", 1), ("0.24.0", 0), ("0.33.1rc2+cpu", 0), ("0.34.0", 1), ("1.0", 1), ("dev", 1)]:
        monkeypatch.setattr(vllm, "__version__", version)
        caplog.clear()
        build(cls, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
        warnings = [r.getMessage() for r in caplog.records if "neuron_sched" in r.name and r.levelno >= logging.WARNING]
        assert len(warnings) == told, (version, warnings)
        assert all(text in warning for warning in warnings for text in [version, "0.24 to 0.33"])


@both
@pytest.mark.parametrize("group", compat.METHODS, ids=str)
def test_a_scheduler_without_a_method_is_refused(name: str, group, monkeypatch: pytest.MonkeyPatch):
    names = [group] if isinstance(group, str) else group
    if any(hasattr(SchedulerInterface, method) for method in names):
        pytest.skip("part of vLLM's public interface of schedulers: no scheduler is without it")
    for base in [Scheduler, AsyncScheduler]:
        for method in vars(base).keys() & set(names):
            monkeypatch.delattr(base, method)
    refused(name, " or ".join(names))


@pytest.mark.parametrize("group", compat.ATTRIBUTES, ids=str)
def test_a_scheduler_without_an_attribute_is_refused(group, monkeypatch: pytest.MonkeyPatch):
    names = [group] if isinstance(group, str) else group
    original = Scheduler.__init__

    def lacking(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for attribute in names:
            vars(self).pop(attribute, None)
            # One that the class has, for all: a property.
            for cls in type(self).__mro__:
                if attribute in vars(cls):
                    monkeypatch.delattr(cls, attribute)

    monkeypatch.setattr(Scheduler, "__init__", lacking)
    refused("NeuronScheduler", " or ".join(names))


def refused(name: str, lacks: str):
    cls = getattr(neuron_sched, name)
    with pytest.raises(RuntimeError) as refusal:
        build(cls, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
    sentence = str(refusal.value)
    assert all(text in sentence for text in [f"lacks {lacks}", vllm.__version__, "0.24 to 0.33"]), sentence


# How the classes are found


@both
def test_names_are_those_that_vllm_resolves(name: str):
    cls = getattr(neuron_sched, name)
    assert cls is getattr(importlib.import_module("neuron_sched.vllm.scheduler"), name)
    assert issubclass(cls, CLASSES[name])
    assert issubclass(cls, neuron_sched.NeuronScheduler)


@both
def test_it_runs(name: str):
    cls = getattr(neuron_sched, name)
    sched = build(cls, max_num_batched_tokens=64, async_scheduling=cls is neuron_sched.NeuronAsyncScheduler)
    if cls is neuron_sched.NeuronScheduler:
        assert run(sched, {0: [request("a", 100, 2)]}) == [{"a": 64}, {"a": 36}, {"a": 1}]
