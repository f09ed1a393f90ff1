"""The golden pair after a fine-tune: other weights of the same shapes, and how they get into a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from golden_server import DRAFT, TARGET, call
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD
from sglang_dspark.tools.launch import LaunchedServer, free_port

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


def from_trainer(server: LaunchedServer, folder: Path) -> dict[str, Any]:
    """Send a target's tensors through a group of processes that this one leads."""
    from sglang.srt.utils import init_custom_process_group

    tensors, port = load_file(folder / FILE), free_port()
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "group_name": "trainer"}
    joins = {**group, "rank_offset": 1, "backend": "gloo"}
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "trainer",
    }
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(answered, server, "/init_weights_update_group", joins)
        ranks = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="trainer")
        joined.result()
        answered(server, "/begin_weight_update", {})
        written = pool.submit(answered, server, "/update_weights_from_distributed", body)
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=ranks)
        answer = written.result()
        answered(server, "/end_weight_update", {})
        answered(server, "/destroy_weights_update_group", {"group_name": "trainer"})
    torch.distributed.destroy_process_group(ranks)
    return answer


def answered(server: LaunchedServer, path: str, body: Any) -> dict[str, Any]:
    """Return an answer that is a success."""
    status, text = call(server, path, body=body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def trained_drafter(folder: Path, *, by: float = 0.1, seed: int = 2) -> Path:
    """Write a drafter of the golden target, of the same form, that was trained on."""
    return tuned(folder, DRAFT, by=by, seed=seed)


def bare(drafter: Path, folder: Path) -> Path:
    """Write a drafter without what it has of its target."""
    shutil.copytree(drafter, folder)
    tensors = {name: tensor for name, tensor in load_file(drafter / FILE).items() if name not in (EMBEDDING, LM_HEAD)}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder
