"""Ratios of two sides measured in one process, and the gates on them.

A benchmark first asserts that both sides give the same answer, then measures:

    def test_steady_decode(ratio):
        assert ours() == oracle()
        ratio(oracle, ours, at_least=20)

No gate is an absolute time: both sides slow down together on a busy machine.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns

import pytest

import neuron_sched


@dataclass(frozen=True)
class Measured:
    """Median nanoseconds of one call of each side, and the gate they were held against."""

    label: str
    baseline_ns: float
    ours_ns: float
    gate: str

    @property
    def ratio(self) -> float:
        return self.baseline_ns / self.ours_ns

    def __str__(self) -> str:
        times = f"baseline {self.baseline_ns / 1e3:,.2f} us, ours {self.ours_ns / 1e3:,.2f} us"
        return f"{self.label}: {times}: ratio {self.ratio:.3g} ({self.gate})"


RATIOS = pytest.StashKey[list[Measured]]()
NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    profile = neuron_sched.build_info()["profile"]
    if profile != "release":
        pytest.exit(f"the installed build is a {profile} build, whose times mean nothing: run `make bench`", 4)
    config.stash[RATIOS] = []
    config.stash[NOTES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("ratios")
    for line in [*config.stash[RATIOS], *config.stash[NOTES]]:
        terminalreporter.line(str(line))


def label(request: pytest.FixtureRequest) -> str:
    """The file says which side is measured: tests in different files may have the same name."""
    return f"{request.path.stem}: {request.node.name}"


def calls_within(call: Callable[[], object], seconds: float) -> int:
    """How many calls fill that time, at least one."""
    calls = 1
    while True:
        start = thread_time_ns()
        for _ in range(calls):
            call()
        taken = (thread_time_ns() - start) / 1e9
        if taken >= seconds / 4:
            return max(1, round(calls * seconds / taken))
        calls *= 4


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the report at the end: a figure that is told, not gated."""
    return lambda text: request.config.stash[NOTES].append(f"{label(request)}: {text}")


@pytest.fixture
def ratio(request: pytest.FixtureRequest, benchmark) -> Callable[..., float]:
    """`ratio(baseline, ours, at_least=20)`: how many times longer a call of `baseline` takes than one of `ours`.

    Rounds of about `round_s` seconds alternate between the two sides, with the garbage collector off and what
    exists frozen; the ratio is that of the medians of `rounds` rounds. Fails when it is below `at_least` or not
    below `below`. Either side must be callable any number of times at equal cost; what `ours` took is also
    recorded as a pytest-benchmark result. Once a test.
    """

    def measure(
        baseline: Callable[[], object],
        ours: Callable[[], object],
        *,
        at_least: float | None = None,
        below: float | None = None,
        rounds: int = 41,
        round_s: float = 0.005,
    ) -> float:
        per_call: dict[Callable[[], object], list[float]] = {baseline: [], ours: []}
        calls = {side: calls_within(side, round_s) for side in per_call}

        def run(side: Callable[[], object]) -> None:
            call, count = side, calls[side]
            start = thread_time_ns()
            for _ in range(count):
                call()
            per_call[side].append((thread_time_ns() - start) / count)

        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            # The set-up of a round is not part of its time: that is where the other side's round goes.
            benchmark.pedantic(run, args=(ours,), setup=lambda: run(baseline), rounds=rounds)
        finally:
            gc.enable()
            gc.unfreeze()
        gates = {"at least": at_least, "below": below}
        gate = ", ".join(f"{name} {limit:g}" for name, limit in gates.items() if limit is not None) or "no gate"
        baseline_ns, ours_ns = (statistics.median(times) for times in per_call.values())
        measured = Measured(label(request), baseline_ns, ours_ns, gate)
        request.config.stash[RATIOS].append(measured)
        benchmark.extra_info.update(
            baseline_ns=baseline_ns, ours_ns=ours_ns, calls_per_round=calls[ours], ratio=measured.ratio, gate=gate
        )
        assert at_least is None or measured.ratio >= at_least, str(measured)
        assert below is None or measured.ratio < below, str(measured)
        return measured.ratio

    return measure
