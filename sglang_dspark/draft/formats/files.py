"""The files of a checkpoint: what config.json says of the network, and tensors under their ordinary names."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.draft.formats.tensors import DRAFT_TO_TARGET, IS_DRAFTED
from sglang_dspark.draft.quantised.gguf_file import GgufFile, open_gguf
from sglang_dspark.draft.quantised.modules import DequantisedTensors
from sglang_dspark.draft.quantised.recognition import KEYS, recognise
from sglang_dspark.draft.quantised.storage import Storage
from sglang_dspark.draft.stored import FLOATS, StoredTensors, has_tensors
from sglang_dspark.errors import CheckpointError

CONFIG_FILE = "config.json"
Tensors = StoredTensors | DequantisedTensors | GgufFile
_MASK_FILE = "mask_embedding.pt"
_QUANTISATION_FILE = "hf_quant_config.json"
_PLAIN_TENSORS = (".weight", ".bias", ".attention_sink_bias", ".layer_scalar", DRAFT_TO_TARGET, IS_DRAFTED)


@dataclass(frozen=True)
class Files:
    """An open checkpoint.

    Attributes:
        content: decoded config.json, without the keys by which tensors have been dequantised.
        origin: the file that it is from, for messages.
        tensors: None without tensor files.
        storage: how they are quantised; None if they are not.
    """

    content: Mapping[str, Any]
    origin: str
    tensors: Tensors | None
    storage: Storage | None = None


def open_files(path: Path, stack: ExitStack) -> Files:
    """Open a checkpoint until ``stack`` is closed.

    Args:
        path: its folder, or a GGUF file.

    Raises:
        CheckpointError: files are missing or damaged, or quantised in a way that is not read.
    """
    if (file := _gguf_in(path)) is not None:
        gguf = open_gguf(file)
        return Files(gguf.content, str(file), gguf, gguf.storage)
    if (path / _MASK_FILE).is_file():
        words = "an embedding of the mask that is not the target's is not supported; use another drafter of this target"
        raise CheckpointError(f"{path / _MASK_FILE}: {words}")
    content, origin = _decode(path / CONFIG_FILE), str(path / CONFIG_FILE)
    if not has_tensors(path):
        return Files(content, origin, None)
    stored = StoredTensors(path, stack)
    config = next((content[key] for key in KEYS if content.get(key)), None)
    if config is None and (path / _QUANTISATION_FILE).is_file():
        config = _decode(path / _QUANTISATION_FILE)
    if not isinstance(config, Mapping) or _is_plain(stored):
        return Files(content, origin, stored)
    dequantised = DequantisedTensors(stored, recognise(config, origin), str(path))
    content = {key: value for key, value in content.items() if key not in KEYS}
    return Files(content, origin, dequantised, dequantised.storage)


def _is_plain(stored: StoredTensors) -> bool:
    """Return whether tensors are what their names say: a trainer may have copied the quantisation of its target."""
    return all(
        name.endswith(_PLAIN_TENSORS) and (stored.dtype(name) in FLOATS or name in (DRAFT_TO_TARGET, IS_DRAFTED))
        for name in stored.shapes
    )


def _gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is or holds; None if it has safetensors, or neither."""
    if path.is_file():
        return path
    files = [] if has_tensors(path) else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several GGUF files, {names}; give the path of one")
    return files[0] if files else None


def _decode(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); give the directory of a downloaded drafter, or a .gguf file"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error}); download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not an object; download it again")
    return content
