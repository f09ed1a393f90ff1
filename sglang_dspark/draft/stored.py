"""The tensor files of checkpoints, and what files of a target say of its layers."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_dspark.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are no codes of a quantisation, in the terms of safetensors."""


class StoredTensors:
    """Tensors of one checkpoint by their name in its files, which stay open until ``stack`` is closed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Open the files.

        Raises:
            CheckpointError: there are none, or they are damaged or incomplete.
        """
        if (folder / INDEX_FILE).is_file():
            declared = _read_index(folder / INDEX_FILE)
            files = sorted(set(declared.values()))
        elif (folder / SINGLE_FILE).is_file():
            declared, files = {}, [SINGLE_FILE]
        else:
            raise CheckpointError(
                f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; give a complete checkpoint directory or a GGUF "
                "file, and convert other weight formats to safetensors"
            )
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{folder / file}: cannot be read ({error}); download the checkpoint again"
                ) from error
            self._files |= dict.fromkeys(handle.keys(), handle)
        absent = sorted(declared.keys() - self._files.keys())
        if absent:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: lists tensors that its shards do not hold: {', '.join(absent)}; download the "
                "checkpoint again"
            )
        self.num_bytes = sum((folder / file).stat().st_size for file in files)
        """Size of the files."""

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor by its name."""
        return {name: file.get_slice(name).get_shape() for name, file in self._files.items()}

    def dtype(self, name: str) -> str:
        """Return the dtype in the terms of safetensors, such as BF16."""
        return str(self._files[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Any:
        """Read the tensor to the CPU."""
        return self._files[name].get_tensor(name)


def has_tensors(folder: Path) -> bool:
    """Return whether there are tensor files at all."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: no readable weight_map ({error!r}); download the checkpoint again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: weight_map is not a map from tensors to files; download the checkpoint again")
    for shard in weight_map.values():
        if Path(shard).name != shard or shard == "..":
            raise CheckpointError(f"{file}: weight_map names {shard!r}, which is no file of this folder")
    return weight_map


_PREFIXES = {
    "embed_tokens": ("model.embed_tokens.", "model.language_model.embed_tokens.", "language_model.model.embed_tokens."),
    "lm_head": ("lm_head.", "language_model.lm_head."),
}
"""What the names of a layer's tensors begin with: in text models, then in models that read images, whichever release of
transformers wrote them."""


def quantised_layers(folder: Path, *, tied: bool) -> Sequence[str]:
    """Return which of ``embed_tokens`` and ``lm_head`` a target holds in another form than floating-point weights.

    A layer without tensors of these names is not listed, and a target that is no folder of safetensors has none:
    then only the loaded layer tells.

    Args:
        tied: the LM head is the embedding.

    Raises:
        CheckpointError: the tensor files are damaged or incomplete.
    """
    if not has_tensors(folder):
        return ()
    with ExitStack() as stack:
        stored = StoredTensors(folder, stack)
        layers = {"embed_tokens": "embed_tokens", "lm_head": "embed_tokens" if tied else "lm_head"}
        return [
            layer
            for layer, source in layers.items()
            if any(_is_quantised(stored, prefix) for prefix in _PREFIXES[source])
        ]


def _is_quantised(stored: StoredTensors, prefix: str) -> bool:
    if not any(name.startswith(prefix) for name in stored.shapes):
        return False
    weight = f"{prefix}weight"
    return weight not in stored.shapes or stored.dtype(weight) not in FLOATS


def check_replacement(folder: Path, served: Path, *, tied: bool) -> None:
    """Check that a checkpoint has the tensors of the target that is served, in their shapes.

    SGLang leaves missing tensors as they were, and on a CPU it cuts or pads some that have another shape. A checkpoint
    whose tensors all have other names is left to SGLang, and so is all if the served one is no folder of safetensors.

    Args:
        folder: the new checkpoint, a folder of safetensors.
        served: the one that was loaded before.
        tied: the LM head is the embedding, so it may be missing.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or files are damaged or incomplete.
    """
    if not has_tensors(served):
        return
    with ExitStack() as stack:
        shapes, expected = (StoredTensors(path, stack).shapes for path in (folder, served))
    if shapes.keys().isdisjoint(expected):
        return
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            found = f"{name} has the shape {shapes[name]}, and {shape} in {served}"
        elif name not in shapes and not (tied and name.startswith(_PREFIXES["lm_head"])):
            found = f"{name} is missing, which is in {served}"
        else:
            continue
        raise CheckpointError(
            f"{folder}: {found}. No weight was changed; pass a checkpoint of the model that is served"
        )
