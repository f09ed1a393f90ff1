"""The golden pair after a fine-tune: other weights of the same shapes, and how they get into a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from golden_server import DRAFT, TARGET, call
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD
from sglang_dspark.tools.launch import LaunchedServer

FILE = "model.safetensors"


def tuned(folder: Path, origin: Path = TARGET, *, by: float = 0.2, seed: int = 1) -> Path:
    """Write a checkpoint whose matrices differ from those of ``origin`` by noise of so many standard deviations.

    A drafter keeps what it has of its target.
    """
    shutil.copytree(origin, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(origin / FILE)
    for name, weight in tensors.items():
        if weight.dim() > 1 and name not in (EMBEDDING, LM_HEAD):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((by * weight.float().std() * noise).to(weight.dtype))
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def serialized(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Return tensors as the route takes them: they lie in shared memory that any process of this machine can open."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")
    return [MultiprocessingSerializer.serialize(list(named.items()), output_str=True)]


def from_disk(server: LaunchedServer, folder: Path, **fields: Any) -> dict[str, Any]:
    """Have a server load a target."""
    return answered(server, "/update_weights_from_disk", {"model_path": str(folder), **fields})


def from_tensors(server: LaunchedServer, source: Path | Mapping[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    """Hand tensors, or those of a checkpoint, to each of two ranks at most."""
    answered(server, "/begin_weight_update", {})
    tensors = load_file(source / FILE) if isinstance(source, Path) else source
    body = {"serialized_named_tensors": serialized(tensors) + serialized(tensors), **fields}
    try:
        return answered(server, "/update_weights_from_tensor", body)
    finally:
        answered(server, "/end_weight_update", {})


def answered(server: LaunchedServer, path: str, body: Any) -> dict[str, Any]:
    """Return an answer that is a success."""
    status, text = call(server, path, body=body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def trained_drafter(folder: Path, *, by: float = 0.02, seed: int = 2) -> Path:
    """Write a drafter of the golden target, of the same form, that was trained on."""
    return tuned(folder, DRAFT, by=by, seed=seed)
