"""Checkpoints named as on the hub, from its cache; nothing is reached over a network."""

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from sglang_dspark.errors import CheckpointError
from sglang_dspark.hub import checkpoint_name, drafter_in_target, local_folder
from sglang_dspark.tools.cli.options import Checkpoint

FLAG = "--speculative-draft-model-path"


@pytest.fixture(autouse=True)
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


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert local_folder("org/name", flag=FLAG) == "org/name"


def test_a_name_is_looked_up_in_the_cache(tmp_path):
    main = cached(tmp_path, "org/name", "main", "a" * 40)
    tagged = cached(tmp_path, "org/name", "v2", "b" * 40)
    assert local_folder("org/name", flag=FLAG, cache_dir=str(tmp_path)) == str(main)
    assert local_folder("org/name", flag=FLAG, cache_dir=str(tmp_path), revision="v2") == str(tagged)


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


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        local_folder(str(tmp_path), flag=FLAG)


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


def test_a_gguf_file_is_its_own_folder(tmp_path):
    file = tmp_path / "draft.gguf"
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError):
            local_folder(str(path), flag=FLAG)
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        assert local_folder(str(path), flag=FLAG) == str(path)
