"""The tables of a replay, as text."""

from __future__ import annotations

import io
from typing import Any

import pytest

from neuron_sched.cli.tables import duration, figures, share, write_tables


def statistics(mean: float | None, tail: float | None) -> dict[str, float | None]:
    return {"mean": mean, "p50": mean, "p90": mean, "p99": tail, "max": tail}


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "completed": 2867,
        "rejected": 2,
        "rejections": [{"id": "a", "reason": "prompt_too_long"}, {"id": "b", "reason": "kv_never_fits"}],
        "makespan_s": 603.21,
        "requests_per_s": 4.7529,
        "output_tokens_per_s": 1002.33,
        "ttft_ms": statistics(205.3, 145234.5),
        "itl_ms": statistics(25.0, 900.0),
        "e2e_ms": statistics(6543.2, 20000.0),
        "queue_ms": statistics(None, None),
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


def row(text: str, start: str) -> list[str]:
    """Return the cells of the only line that starts with `start`. At least two blanks separate two cells."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_totals_count_completed_and_rejected_requests():
    text = tables()
    assert text.startswith("t.csv\n")
    assert row(text, "requests") == ["requests", "2,867 completed, 2 rejected"]
    assert row(text, "time") == ["time", "603 s"]
    assert row(text, "throughput") == ["throughput", "4.75 requests/s, 1,002 output tokens/s"]
    assert "rejected" not in tables(rejected=0)


def test_latencies_have_units_and_missing_ones_are_dashes():
    text = tables()
    assert row(text, "to first token") == ["to first token", *["205 ms"] * 3, *["145 s"] * 2]
    assert row(text, "queueing") == ["queueing", *["-"] * 5]


def test_padding_is_listed_by_bucket():
    text = tables()
    assert row(text, "prefill")[:6] == ["prefill", "all", "2,867", "42,000", "93,824", "55.2 %"]
    assert row(text, "128")[:5] == ["128", "711", "40,000", "91,008", "56.0 %"]
    assert row(text, "96")[:5] == ["96", "4,000", "300,000", "384,000", "21.9 %"]
    assert row(text, "1 ") == ["1", "100", "100", "100", "0.0 %"]


def test_unpadded_steps_have_no_padding_columns():
    text = tables(
        padding={"prefill": {}, "decode": {}},
        tokens=dict.fromkeys(("prompt", "prompt_padded"), 5) | {"decode": 7, "decode_padded": 7},
    )
    assert row(text, "steps") == ["steps", "steps", "tokens"]
    assert row(text, "prefill") == ["prefill", "2,867", "5"]
    assert "pad" not in text


def test_wait_reasons_are_sorted_by_time():
    text = tables()
    assert row(text, "slots") == ["slots", "123 s", "20.5 %", "every slot was taken"]
    assert text.index("\nslots") < text.index("\nkv")
    assert "waited" not in tables(wait_reasons={})
    assert row(tables(wait_reasons={"new_reason": 5.0}), "new_reason") == ["new_reason", "5.00 ms", "0.0 %"]


def test_prefill_batch_full_is_explained_by_prompts_not_by_tokens():
    line = row(tables(wait_reasons={"prefill_batch_full": 5.0}), "prefill_batch_full")
    assert line[-1] == "the step takes no more prompts"


def test_piped_tables_are_plain_text_of_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = tables(tokens={"prompt": 10**9, "prompt_padded": 10**9, "decode": 10**9, "decode_padded": 10**9})
    assert "\x1b" not in text
    assert all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())
    assert "1,000,000,000" in text


@pytest.mark.parametrize("columns", ["20", "79", "200"])
def test_no_number_is_truncated_on_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch, columns: str):
    monkeypatch.setenv("COLUMNS", "80")
    text = tables()
    monkeypatch.setenv("COLUMNS", columns)
    assert tables() == text


def test_tables_widen_for_large_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    large = 123_456_789_012_345_678
    text = tables(tokens=dict.fromkeys(("prompt", "prompt_padded", "decode", "decode_padded"), large))
    assert text.count(f"{large:,}") == 4


@pytest.mark.parametrize("padding", [{}, {"padding": {"prefill": {}, "decode": {}}}])
def test_all_tables_have_the_same_width(padding: dict[str, Any]):
    rules = [line for line in tables(**padding).splitlines() if set(line) == {"\u2500"}]
    assert len(rules) == 3
    assert len(set(rules)) == 1


def test_tables_are_written_to_an_ascii_output():
    data = io.BytesIO()
    file = io.TextIOWrapper(data, encoding="ascii", write_through=True)
    write_tables(summary(), title="\u6f22\udcff.csv", file=file)
    assert data.getvalue().startswith(b"??.csv\n")
    assert b"####" in data.getvalue()


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0.00 ms"), (9.994, "9.99 ms"), (25, "25.0 ms"), (205.3, "205 ms"), (1000, "1.00 s"), (4_000_000, "4,000 s")],
)
def test_durations_have_three_digits_and_a_unit(ms: float, text: str):
    assert duration(ms) == text


def test_figures_have_three_digits_and_shares_one_decimal():
    assert [figures(number) for number in (0.123, 12.34, 1234.5)] == ["0.12", "12.3", "1,234"]
    assert [share(1, 3), share(0, 0)] == ["33.3 %", "-"]
