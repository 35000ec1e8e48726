"""The tables of a replay, as text."""

from __future__ import annotations

import io
from typing import Any

import pytest

from neuron_sched.report import duration, figures, progress_bar, share, write_tables


def spread(mean: float | None, top: float | None) -> dict[str, float | None]:
    return {"mean": mean, "p50": mean, "p90": mean, "p99": top, "max": top}


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "completed": 2867,
        "rejected": 2,
        "rejections": [{"id": "a", "reason": "prompt_too_long"}, {"id": "b", "reason": "kv_never_fits"}],
        "makespan_s": 603.21,
        "requests_per_s": 4.7529,
        "output_tokens_per_s": 1002.33,
        "ttft_ms": spread(205.3, 145234.5),
        "itl_ms": spread(25.0, 900.0),
        "e2e_ms": spread(6543.2, 20000.0),
        "queue_ms": spread(None, None),
        "steps": {"prefill": 2867, "decode": 14021},
        "tokens": {"prompt": 42000, "prompt_padded": 93824, "decode": 300100, "decode_padded": 384100},
        "padding": {
            "prefill": {
                "128": {"steps": 711, "real": 40000, "padded": 91008},
                "256": {"steps": 11, "real": 2000, "padded": 2816},
            },
            "decode": {
                "1": {"steps": 100, "real": 100, "padded": 100},
                "96": {"steps": 4000, "real": 300000, "padded": 384000},
            },
        },
        "wait_reasons": {"kv": 22.0, "slots": 123456.7},
    } | changes


def tables(**changes: Any) -> str:
    file = io.StringIO()
    write_tables(summary(**changes), title="t.csv", file=file)
    return file.getvalue()


def cells(text: str, start: str) -> list[str]:
    """The blocks between wide gaps of the line that starts so."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return [cell for cell in line.split("  ") if cell.strip()]


def stripped(text: str, start: str) -> list[str]:
    return [cell.strip() for cell in cells(text, start)]


def test_totals():
    text = tables()
    assert text.startswith("t.csv\n")
    assert stripped(text, "requests") == ["requests", "2,867 completed, 2 refused"]
    assert stripped(text, "time") == ["time", "603 s"]
    assert stripped(text, "throughput") == ["throughput", "4.75 requests/s, 1,002 output tokens/s"]
    assert "refused" not in tables(rejected=0)


def test_latencies_have_units_and_gaps_have_dashes():
    text = tables()
    assert stripped(text, "to first token") == ["to first token", *["205 ms"] * 3, *["145 s"] * 2]
    assert stripped(text, "queueing") == ["queueing", *["-"] * 5]


def test_padding_by_bucket():
    text = tables()
    assert stripped(text, "prefill")[:6] == ["prefill", "all", "2,867", "42,000", "93,824", "55.2 %"]
    assert stripped(text, "128")[:5] == ["128", "711", "40,000", "91,008", "56.0 %"]
    assert stripped(text, "96")[:5] == ["96", "4,000", "300,000", "384,000", "21.9 %"]
    assert stripped(text, "1 ") == ["1", "100", "100", "100", "0.0 %"]


def test_nothing_is_said_of_padding_where_nothing_is_padded():
    text = tables(
        padding={"prefill": {}, "decode": {}},
        tokens=dict.fromkeys(("prompt", "prompt_padded"), 5) | {"decode": 7, "decode_padded": 7},
    )
    assert stripped(text, "steps") == ["steps", "steps", "tokens"]
    assert stripped(text, "prefill") == ["prefill", "2,867", "5"]
    assert "pad" not in text


def test_waits_longest_first():
    text = tables()
    assert stripped(text, "slots") == ["slots", "123 s", "20.5 %", "every slot was taken"]
    assert text.index("\nslots") < text.index("\nkv")
    assert "waited" not in tables(wait_reasons={})
    assert stripped(tables(wait_reasons={"new_reason": 5.0}), "new_reason") == ["new_reason", "5.00 ms", "0.0 %"]


def test_a_step_that_takes_no_more_prompts_may_have_room_for_tokens():
    line = stripped(tables(wait_reasons={"prefill_batch_full": 5.0}), "prefill_batch_full")
    assert line[-1] == "the step takes no more prompts"


def test_piped_tables_are_plain_text_of_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = tables(tokens={"prompt": 10**9, "prompt_padded": 10**9, "decode": 10**9, "decode_padded": 10**9})
    assert "\x1b" not in text
    assert all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())
    assert "1,000,000,000" in text


@pytest.mark.parametrize("columns", ["20", "79", "200"])
def test_no_number_is_cut_on_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch, columns: str):
    monkeypatch.setenv("COLUMNS", "80")
    text = tables()
    monkeypatch.setenv("COLUMNS", columns)
    assert tables() == text


def test_tables_of_large_numbers_grow_rather_than_cut_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    large = 123_456_789_012_345_678
    text = tables(tokens=dict.fromkeys(("prompt", "prompt_padded", "decode", "decode_padded"), large))
    assert text.count(f"{large:,}") == 4


@pytest.mark.parametrize("padding", [{}, {"padding": {"prefill": {}, "decode": {}}}])
def test_all_tables_are_equally_wide(padding: dict[str, Any]):
    rules = [line for line in tables(**padding).splitlines() if set(line) == {"\u2500"}]
    assert len(rules) == 3
    assert len(set(rules)) == 1


def test_tables_survive_an_output_of_ascii_only():
    data = io.BytesIO()
    file = io.TextIOWrapper(data, encoding="ascii", write_through=True)
    write_tables(summary(), title="\u6f22\udcff.csv", file=file)
    assert data.getvalue().startswith(b"??.csv\n")
    assert b"####" in data.getvalue()


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0.00 ms"), (9.994, "9.99 ms"), (25, "25.0 ms"), (205.3, "205 ms"), (1000, "1.00 s"), (4_000_000, "4,000 s")],
)
def test_durations(ms: float, text: str):
    assert duration(ms) == text


def test_figures_and_shares():
    assert [figures(number) for number in (0.123, 12.34, 1234.5)] == ["0.12", "12.3", "1,234"]
    assert [share(1, 3), share(0, 0)] == ["33.3 %", "-"]


def test_no_progress_bar_off_a_terminal(capsys: pytest.CaptureFixture[str]):
    with progress_bar(10) as progress:
        assert progress is None
    assert capsys.readouterr().err == ""


def test_the_progress_bar_moves_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar(10) as progress:
        assert progress is not None
        progress(5, 10)
    output = capsys.readouterr()
    assert "replaying" in output.err
    assert output.out == ""
