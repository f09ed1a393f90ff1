"""A file is there whole or not at all."""

import os
from pathlib import Path

import pytest

from sglang_dspark.files import atomic_write, atomic_write_text


def test_a_text_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "new" / "text.json"
    atomic_write_text(path, "old")
    atomic_write_text(path, "new\u00e9")
    assert path.read_text(encoding="utf-8") == "new\u00e9"
    assert list(path.parent.iterdir()) == [path]


def test_the_old_content_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "text"
    path.write_text("old")
    with atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_writer_that_fails_leaves_nothing_behind(tmp_path, is_folder):
    path = tmp_path / "text"
    path.write_text("old")

    def write():
        with atomic_write(path) as partial:
            if is_folder:
                partial.mkdir()
            (partial / "part" if is_folder else partial).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_at_once_and_replaces_none_that_holds_something(tmp_path):
    def write(text):
        with atomic_write(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "part").write_text(text)
            assert not (tmp_path / "folder").exists() or text == "second"

    write("first")
    with pytest.raises(OSError, match="not empty"):
        write("second")
    assert [(path.name, path.read_text()) for path in (tmp_path / "folder").iterdir()] == [("part", "first")]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    with atomic_write(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "part").write_text("text")
    assert synced == [partial / "part", partial, tmp_path]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with atomic_write(tmp_path / "text") as first, atomic_write(tmp_path / "text") as second:
        first.write_text("a" * 10)
        second.write_text("b")
    assert (tmp_path / "text").read_text() == "a" * 10


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_get_the_permissions_of_any_new_file(tmp_path, umask, mode):
    """Whatever the library that wrote them gives: safetensors lets only the owner read."""
    previous = os.umask(umask)
    try:
        with atomic_write(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "part").write_text("text")
            (partial / "part").chmod(0o600)
        with atomic_write(tmp_path / "file") as partial:
            partial.write_text("text")
            partial.chmod(0o600)
    finally:
        os.umask(previous)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("folder/part", "file")] == [mode, mode]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "part"]
