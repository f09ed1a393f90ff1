"""Reading a checkpoint folder of any format."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import deepspec, dflash, speculators
from sglang_dspark.draft.formats.content import Content, Shapes
from sglang_dspark.draft.formats.reading import Reading
from sglang_dspark.draft.formats.recognition import recognise
from sglang_dspark.draft.formats.stored import StoredTensors, has_tensors
from sglang_dspark.errors import CheckpointError

CONFIG_FILE = "config.json"
_QUANTISED_FILE = "hf_quant_config.json"


def read_config(folder: str | Path) -> DraftConfig:
    """Read the configuration of the checkpoint in ``folder``; see :func:`read`."""
    return read(folder).config


def read(folder: str | Path) -> Reading:
    """Read the checkpoint in ``folder``, of whatever format, but for the values of its tensors.

    Raises:
        CheckpointError: files are missing or damaged, or the drafter is one that is not served.
    """
    folder = Path(folder)
    shapes: Shapes = {}
    if has_tensors(folder):
        with ExitStack() as stack:
            shapes = StoredTensors(folder, stack).shapes
    return read_content(_decode(folder / CONFIG_FILE), origin=str(folder / CONFIG_FILE), shapes=shapes)


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


def _decode(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); give the directory of a downloaded drafter"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error}); download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not an object; download it again")
    quantised = file.with_name(_QUANTISED_FILE)
    if quantised.is_file():
        raise CheckpointError(f"{quantised}: the drafter is quantised, which is not supported; use an unquantised one")
    return content
