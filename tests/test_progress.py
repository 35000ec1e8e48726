"""Progress bar on standard error."""

from __future__ import annotations

import pytest

from neuron_sched.progress import progress_bar


def test_without_a_terminal_there_is_no_progress_bar(capsys: pytest.CaptureFixture[str]):
    with progress_bar(10) as progress:
        assert progress is None
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_progress_bar_is_updated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar(10) as progress:
        assert progress is not None
        progress(5, 10)
    output = capsys.readouterr()
    assert "replaying" in output.err
    assert output.out == ""
