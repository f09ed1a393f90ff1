"""Reading a checkpoint of any format."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import deepspec, dflash, speculators
from sglang_dspark.draft.formats.content import Content, Shapes
from sglang_dspark.draft.formats.files import open_files
from sglang_dspark.draft.formats.reading import Reading
from sglang_dspark.draft.formats.recognition import recognise


def read_config(path: str | Path) -> DraftConfig:
    """Read the configuration of the checkpoint at ``path``; see :func:`read`."""
    return read(path).config


def read(path: str | Path) -> Reading:
    """Read a checkpoint, of whatever format, but for the values of its tensors.

    Args:
        path: its folder, or a GGUF file.

    Raises:
        CheckpointError: files are missing or damaged, or the drafter is one that is not served.
    """
    with ExitStack() as stack:
        files = open_files(Path(path), stack)
        shapes = None if files.tensors is None else files.tensors.shapes
    return replace(read_content(files.content, origin=files.origin, shapes=shapes), storage=files.storage)


def read_content(content: Mapping[str, Any], *, origin: str, shapes: Shapes | None = None) -> Reading:
    """Read a decoded config.json.

    Args:
        content: the config.json.
        origin: its name, for messages.
        shapes: of the tensors in the checkpoint's files; None or empty if there are none.

    Raises:
        CheckpointError: a key is missing, malformed, contradictory or unsupported, or the format is not known.
    """
    keys = Content(content, origin, shapes)
    name = recognise(content, keys.shapes.keys(), origin)
    if name == "DeepSpec":
        return deepspec.read(keys)
    if name == "speculators":
        return speculators.read(keys)
    return dflash.read(name, keys)
