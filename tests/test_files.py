"""Tests of files that are there whole or not at all, of lines, of checkpoints' names, and of the fence.

A failing function that only advises costs its advice, is logged once, and is counted.
"""

import logging
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from sglang_dspark.errors import FAILURES, CheckpointError, best_effort, nothing
from sglang_dspark.files import atomic_write, atomic_write_text, lines_of
from sglang_dspark.hub import checkpoint_name, drafter_in_target, local_folder
from sglang_dspark.tools.cli.options import Checkpoint


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


SEPARATORS = "\u2028\u2029\u0085"  # ends of lines to Python, letters to JSON


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb", "a\n\nb\n", f"a{SEPARATORS}b\nc"])
def test_lines_are_those_of_a_file(text, tmp_path):
    path = tmp_path / "lines"
    path.write_text(text, encoding="utf-8", newline="")
    with path.open(encoding="utf-8", newline="\n") as file:
        assert lines_of(text) == [line.removesuffix("\n") for line in file]


@pytest.fixture
def failures():
    yield FAILURES
    FAILURES.clear()


@best_effort("halves", instead=lambda number: -number)
def half(number):
    if number % 2:
        raise ValueError(number)
    return number // 2


@pytest.mark.usefixtures("failures")
def test_a_failure_is_replaced_logged_once_and_counted(caplog, failures):
    assert [half(number) for number in (4, 3, 5)] == [2, -3, -5]
    assert failures == {"halves": 2}
    (record,) = caplog.records
    assert (record.levelno, "halves" in record.getMessage()) == (logging.ERROR, True)
    assert record.exc_info[0] is ValueError


@pytest.mark.usefixtures("failures")
def test_what_returns_nothing_returns_nothing(failures):
    seen = []

    @best_effort("notes", instead=nothing)
    def note(number, *, fails):
        seen.append(number)
        if fails:
            raise KeyError(number)

    assert (note(1, fails=False), note(2, fails=True)) == (None, None)
    assert seen == [1, 2] and failures == {"notes": 1}


@pytest.mark.usefixtures("failures")
def test_an_end_of_the_process_is_no_failure(failures):
    @best_effort("ends", instead=nothing)
    def end():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end()
    assert not failures


FLAG = "--speculative-draft-model-path"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def cached(root, name, revision, commit):
    """A repository as the hub's client keeps it."""
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return snapshot


@pytest.mark.usefixtures("offline")
def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert local_folder("org/name", flag=FLAG) == "org/name"


@pytest.mark.usefixtures("offline")
def test_a_name_is_looked_up_in_the_cache(tmp_path):
    main = cached(tmp_path, "org/name", "main", "a" * 40)
    tagged = cached(tmp_path, "org/name", "v2", "b" * 40)
    assert local_folder("org/name", flag=FLAG, cache_dir=str(tmp_path)) == str(main)
    assert local_folder("org/name", flag=FLAG, cache_dir=str(tmp_path), revision="v2") == str(tagged)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("org/absent", "no repository of this name in the local cache"),
        ("/absent/folder", "no repository can have this name"),
        ("a/b/c", "no repository can have this name"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path, name, complaint):
    with pytest.raises(CheckpointError, match=complaint) as error:
        local_folder(name, flag=FLAG, cache_dir=str(tmp_path))
    assert f"{FLAG}={name!r}" in str(error.value)


@pytest.mark.usefixtures("offline")
def test_a_target_may_have_its_drafter_in_a_folder_of_its_own(tmp_path):
    target = cached(tmp_path, "org/name", "main", "a" * 40)
    for name in (str(target), "org/name"):
        assert drafter_in_target(name, cache_dir=str(tmp_path)) is None
    (target / "dspark").mkdir()
    (target / "dspark" / "config.json").write_text("{}")
    for name in (str(target), "org/name"):
        assert drafter_in_target(name, cache_dir=str(tmp_path)) == str(target / "dspark")
    for absent in ("org/absent", "/absent/folder"):
        assert drafter_in_target(absent, cache_dir=str(tmp_path)) is None


@pytest.mark.usefixtures("offline")
def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        local_folder(str(tmp_path), flag=FLAG)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/drafter", "drafter"),
        ("/models/drafter/", "drafter"),
        ("org/drafter", "drafter"),
        ("/hub/models--org--a-drafter/snapshots/0123", "a-drafter"),
        ("/my/snapshots/0123", "0123"),
        ("drafter", "drafter"),
    ],
)
def test_a_checkpoint_has_the_same_name_wherever_it_lies(path, name):
    assert checkpoint_name(path) == name


@pytest.mark.usefixtures("offline")
def test_options_take_a_name_or_a_folder(tmp_path, monkeypatch):
    snapshot = cached(tmp_path, "org/name", "main", "c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    @click.command()
    @click.option("--target", type=Checkpoint())
    def command(target):
        click.echo(target)

    for value in ("org/name", str(snapshot)):
        assert CliRunner().invoke(command, ["--target", value]).output == f"{snapshot}\n"
    refused = CliRunner().invoke(command, ["--target", "org/absent"])
    assert "--target='org/absent': there is no such folder" in str(refused.exception)


@pytest.mark.usefixtures("offline")
def test_a_gguf_file_is_its_own_folder(tmp_path):
    file = tmp_path / "draft.gguf"
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError):
            local_folder(str(path), flag=FLAG)
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        assert local_folder(str(path), flag=FLAG) == str(path)
