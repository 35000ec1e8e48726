"""Fixtures that measure the ratio of two sides in one process and compare it with a gate.

A benchmark first asserts that both sides give the same answer, then measures:

    def test_steady_decode(ratio):
        assert ours() == baseline()
        ratio(baseline, ours, at_least=20)

No gate is an absolute time, because a busy machine slows both sides down alike.
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
    """Median time of one call of each side in nanoseconds, and the gate on their ratio."""

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
        pytest.exit(f"profile: {profile!r}: expected a release build to measure: run `make bench`", 4)
    config.stash[RATIOS] = []
    config.stash[NOTES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("ratios")
    for line in [*config.stash[RATIOS], *config.stash[NOTES]]:
        terminalreporter.line(str(line))


def label(request: pytest.FixtureRequest) -> str:
    """Return file and test name; tests in different files may have the same name."""
    return f"{request.path.stem}: {request.node.name}"


def calls_within(call: Callable[[], object], seconds: float) -> int:
    """Return the number of calls that take about `seconds`, at least 1."""
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
    """Add a line to the report at the end, for a figure without a ratio."""
    return lambda text: request.config.stash[NOTES].append(f"{label(request)}: {text}")


@pytest.fixture
def ratio(request: pytest.FixtureRequest, benchmark) -> Callable[..., float]:
    """Measure how many times longer a call of `baseline` takes than a call of `ours`.

    `ratio(baseline, ours, at_least=20)` alternates rounds of about `round_s` seconds between the two sides, with the
    garbage collector off. It returns the ratio of the medians of `rounds` rounds, and fails if the ratio is below
    `at_least` or not below `below`. Repeated calls of a side must have equal cost. The times of `ours` are also
    recorded as a pytest-benchmark result, so a test measures one ratio only.
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
            # pytest-benchmark does not time the set-up of a round, so the baseline's round runs there.
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
