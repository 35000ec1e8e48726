"""Atomic writing of files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from neuron_sched.atomic import write_atomically


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_permission_bits_of_a_replaced_file_are_kept(tmp_path: Path, mode: int):
    path = tmp_path / "out.json"
    path.write_text("old")
    path.chmod(mode)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_atomically(link, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert link.is_symlink()


def test_a_new_file_has_the_default_permission_bits(tmp_path: Path):
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "out.json", b"new")
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_errors_name_the_path_of_the_caller(tmp_path: Path):
    path = tmp_path / "absent" / "x.csv"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(path, b"")
    assert (caught.value.filename, caught.value.filename2) == (str(path), None)
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"
