"""Files that are written whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from neuron_sched.atomic import write_atomically


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_permission_bits_of_an_overwritten_file_stay(tmp_path: Path, mode: int):
    place = tmp_path / "out.json"
    place.write_text("old")
    place.chmod(mode)
    link = tmp_path / "link.json"
    link.symlink_to(place)
    write_atomically(link, b"new")
    assert place.read_bytes() == b"new"
    assert stat.S_IMODE(place.stat().st_mode) == mode
    assert link.is_symlink()


def test_a_new_file_has_the_permission_bits_of_any_new_file(tmp_path: Path):
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "out.json", b"new")
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_errors_name_the_path_that_was_given(tmp_path: Path):
    place = tmp_path / "absent" / "x.csv"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(place, b"")
    assert (caught.value.filename, caught.value.filename2) == (str(place), None)
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{place}'"
