"""Loading and saving the tensors of a draft checkpoint (safetensors, one file or sharded with an index)."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import CheckpointError
from sglang_dspark.files import write_text_whole, written_whole

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_draft_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, config: DraftConfig | None = None
) -> DraftModel:
    """Read a draft checkpoint directory; the model comes back frozen, its confidence head in float32.

    To train it further, call ``requires_grad_()`` and ``train()`` on it.

    ``embed_tokens.weight`` and ``lm_head.weight`` may be absent: the model then needs ``bind_target`` before use.

    Args:
        config: the checkpoint's, where it has been read already.

    Raises:
        CheckpointError: config.json is unfit, a file is missing or damaged, or tensors are missing, unexpected,
            misshapen or not floating point; all offending tensors are named in the one message.
    """
    with ExitStack() as stack:
        model, tensors = _empty_model(Path(path), config, stack)
        model.to(dtype).to_empty(device=device)
        if model.confidence is not None:
            model.confidence.float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[name].get_tensor(name))
    return model.freeze()


def random_draft_model(config: DraftConfig, *, dtype: torch.dtype, device: torch.device | str) -> DraftModel:
    """A frozen drafter of this shape with random weights, which reads the target's embedding and LM head.

    For measuring times: what it proposes is noise. All ranks of a server make the same one.
    """
    with torch.device("meta"):
        model = DraftModel(config, own_embedding=False, own_lm_head=False)
    model.to(dtype).to_empty(device=device)
    if model.confidence is not None:
        model.confidence.float()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.freeze()


def check_draft_model(path: str | Path, config: DraftConfig | None = None) -> None:
    """Look at a draft checkpoint without reading its tensors: :func:`load_draft_model` will not complain.

    Args:
        config: the checkpoint's, where it has been read already.

    Raises:
        CheckpointError: as there.
    """
    with ExitStack() as stack:
        _empty_model(Path(path), config, stack)


def save_draft_model(model: DraftModel, path: str | Path, include_embeddings: bool) -> None:
    """Write ``model.safetensors`` and ``config.json`` into directory ``path``, each whole or not at all.

    With ``include_embeddings`` the embedding and LM head in use, own or the target's, are written too, as DeepSpec
    expects; without, the checkpoint is small and needs the target's.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in (EMBEDDING, LM_HEAD)}
    if include_embeddings:
        tensors |= {EMBEDDING: model.embed_weight, LM_HEAD: model.lm_head_weight}
    # Cloned because frozen K/V weights, and tied target weights, share storage, which safetensors refuses.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    with written_whole(path / SINGLE_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    content = model.config.to_dict() | {"dtype": str(model.fc.weight.dtype).removeprefix("torch.")}
    write_text_whole(path / "config.json", json.dumps(content, indent=2) + "\n")


def _empty_model(path: Path, config: DraftConfig | None, stack: ExitStack) -> tuple[DraftModel, dict[str, Any]]:
    """The model without memory, and the open files that hold its tensors, which fit it."""
    config = config or DraftConfig.from_pretrained(path)
    tensors = _open_tensors(path, stack)
    with torch.device("meta"):
        model = DraftModel(config, own_embedding=EMBEDDING in tensors, own_lm_head=LM_HEAD in tensors)
    _check_tensors(model, tensors, path)
    return model, tensors


def _open_tensors(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it."""
    if (path / INDEX_FILE).is_file():
        declared = _read_index(path / INDEX_FILE)
        files = sorted(set(declared.values()))
    elif (path / SINGLE_FILE).is_file():
        declared, files = {}, [SINGLE_FILE]
    else:
        raise CheckpointError(
            f"{path}: has neither {SINGLE_FILE} nor {INDEX_FILE}; give a complete checkpoint directory, and convert "
            "other weight formats to safetensors"
        )
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(path / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / file}: cannot be read ({error}); download the checkpoint again") from error
        tensors |= dict.fromkeys(handle.keys(), handle)
    absent = sorted(declared.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{path / INDEX_FILE}: lists tensors that its shards do not hold: {', '.join(absent)}; download the "
            "checkpoint again"
        )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: no readable weight_map ({error!r}); download the checkpoint again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: weight_map is not a map from tensors to files; download the checkpoint again")
    return weight_map


def _check_tensors(model: DraftModel, tensors: Mapping[str, Any], path: Path) -> None:
    expected: dict[str, Tensor] = model.state_dict()
    problems = [f"missing {name} {list(expected[name].shape)}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        found = tensors[name].get_slice(name)
        if found.get_shape() != list(expected[name].shape):
            problems.append(f"misshapen {name} {found.get_shape()}, expected {list(expected[name].shape)}")
        elif found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            problems.append(f"not floating point {name} {found.get_dtype()}")
    if problems:
        raise CheckpointError(
            f"{path}: the tensors do not fit config.json: {'; '.join(problems)}. Check that both come from the same "
            "checkpoint and that it is an unquantized DeepSpec Qwen3 DSpark draft"
        )
