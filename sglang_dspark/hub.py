"""Checkpoints by the name that they have on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from sglang_dspark.errors import CheckpointError

DRAFT_FILES = ("*.json", "*.safetensors")
SUBFOLDER = "dspark"
"""Where a target may have its drafter."""


def checkpoint_name(path: str | Path) -> str:
    """Return the name of a checkpoint: its folder, or the repository of which the folder is a snapshot."""
    folder = Path(path)
    repository = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    return repository.rpartition("--")[2] if repository.startswith("models--") else folder.name


def drafter_in_target(target: str, *, revision: str | None = None, cache_dir: str | None = None) -> str | None:
    """Return the folder ``dspark`` of a target, in which its drafter may lie; None where it has none.

    Args:
        target: a folder, or the name of a repository, of which only that folder is downloaded.
        revision, cache_dir: as for :func:`local_folder`.
    """
    folder = Path(target).expanduser()
    if not folder.exists():
        try:
            patterns = [f"{SUBFOLDER}/{pattern}" for pattern in DRAFT_FILES]
            folder = Path(snapshot_download(target, revision=revision, cache_dir=cache_dir, allow_patterns=patterns))
        except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError):
            return None  # what is wrong with the target will be said when it is loaded
    folder = folder / SUBFOLDER
    return str(folder) if (folder / "config.json").is_file() else None


def local_folder(
    name: str,
    *,
    flag: str,
    files: Sequence[str] | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> str:
    """Return the folder of the checkpoint ``name``: a folder, or the name of a repository, which is then downloaded.

    A GGUF file is its own folder.

    Args:
        flag: that gave the name, for messages.
        files: patterns of what is downloaded; None for everything.
        revision: branch, tag or commit of the repository.
        cache_dir: where it is kept; None for the hub's own cache.

    Raises:
        CheckpointError: neither a folder with a ``config.json`` nor a repository that can be had.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        if not ((folder / "config.json").is_file() or folder.suffix == ".gguf" or any(folder.glob("*.gguf"))):
            raise CheckpointError(f"{flag}={name!r} holds no config.json; pass the folder of a checkpoint")
        return str(folder)
    try:
        return snapshot_download(
            name, revision=revision, cache_dir=cache_dir, allow_patterns=None if files is None else list(files)
        )
    except HFValidationError:
        reason = "there is no such folder, and no repository can have this name"
    except LocalEntryNotFoundError:
        reason = "there is no such folder, and no repository of this name in the local cache or within reach"
    except HfHubHTTPError as error:
        reason = f"there is no such folder, and the hub says: {str(error).splitlines()[0]}"
    raise CheckpointError(f"{flag}={name!r}: {reason}; pass the folder of a checkpoint or its name on the hub")
