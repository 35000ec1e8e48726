"""Cost models: constant step times, and profiles in TOML."""

from decimal import Decimal

import pytest

from neuron_sched.simulate import ConstantCost, TableCost, cost_of, profiles, replay
from neuron_sched.trace import TraceRequest
from tests.simulate.support.workloads import CHAT, config, small_chat
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", profiles())
def test_shipped_profiles_can_be_replayed_and_name_their_source(name):
    cost = TableCost.load(name)
    report = replay(small_chat()[:20], config=config(**CHAT), cost=cost)
    assert report.summary["completed"] == 20
    text = (ROOT / f"python/neuron_sched/simulate/profiles/{name}.toml").read_text()
    assert "Publisher:" in text
    assert "SDK" in text


def test_two_profiles_are_shipped():
    assert profiles() == ["llama-3-8b-trn1", "llama-3.1-8b-inf2"]
    assert TableCost.load("llama-3-8b-trn1").prefill == {128: Decimal("17.09"), 4096: Decimal("153.02")}


def test_a_profile_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[prefill]\n128 = 100\n[decode]\n1 = 10.0000005\n")
    workload = [TraceRequest("A", 0, 50, 2)]
    report = replay(workload, config=config(), cost=cost_of(str(file)))
    # Half a nanosecond is rounded up.
    assert report.requests[0].e2e_s == 0.110000001


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[prefill", "not TOML"),
        ("prefill = 3", "prefill: expected a table"),
        ("[prefill]\n128 = 1\n", "decode: expected a table"),
        ("[prefill]\nx = 1\n[decode]\n1 = 1\n", "prefill: x: expected a whole number"),
        ("prefil = 1\n[prefill]\n128 = 1\n[decode]\n1 = 1\n[spare]\n", "prefil, spare: expected description, prefill"),
        ("[prefill]\n128 = -1\n[decode]\n1 = nan\n", "prefill: -1: expected a number of at least 0"),
        ("[prefill]\n0 = 1\n[decode]\n1 = 1\n", "prefill: 0: expected sizes from 1"),
    ],
)
def test_invalid_profiles_are_rejected(tmp_path, content, message):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        cost_of(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill_ms=100", "expected prefill_ms=N,decode_ms=N"),
        ("prefill_ms=1,decode_ms=2,prefill_ms=3", "expected prefill_ms=N,decode_ms=N"),
        ("prefill_ms=x,decode_ms=-2", "prefill_ms: 'x': expected a finite decimal number\ndecode_ms: '-2'"),
        ("no-such-profile", "one of llama-3-8b-trn1, llama-3.1-8b-inf2"),
    ],
)
def test_invalid_costs_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        cost_of(text)


def test_cost_of_reads_constants_and_profile_names():
    assert cost_of("prefill_ms=100, decode_ms=2.5") == ConstantCost("100", "2.5")
    assert cost_of("llama-3-8b-trn1") == TableCost.load("llama-3-8b-trn1")
