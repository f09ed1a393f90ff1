"""Other weights for a drafter that serves: checked as a whole, before any of them is written over the old ones."""

from collections.abc import Iterable, Mapping
from dataclasses import fields

import torch
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats.tensors import TensorRules
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD
from sglang_dspark.errors import CheckpointError

_OF_TRAINING = ("origin", "num_anchors")


def check_alike(serving: ResolvedDrafter, other: ResolvedDrafter) -> None:
    """Refuse a drafter whose network is not that of the serving one.

    Raises:
        CheckpointError: names all that differs, with both values.
    """
    different = [
        f"{name}={theirs!r}, serving {ours!r}"
        for name, ours, theirs in _values(serving.config, other.config)
        if ours != theirs and not (name == "num_target_layers" and None in (ours, theirs))
    ]
    if serving.token_ids != other.token_ids:
        different.append("draft_vocabulary.json, which lists other tokens")
    if different:
        raise CheckpointError(
            f"{other.path}: differs from the drafter that serves: {'; '.join(different)}. Weights alone can be "
            "replaced: restart the server with this drafter, or train one of the same form"
        )


def _values(serving: DraftConfig, other: DraftConfig) -> Iterable[tuple[str, object, object]]:
    names = [field.name for field in fields(DraftConfig) if field.name not in _OF_TRAINING]
    return [(name, getattr(serving, name), getattr(other, name)) for name in names]


def fitted(model: DraftModel, rules: TensorRules, given: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Return tensors by the names of the network's parameters; the model stays as it is.

    Args:
        model: serving, its embedding and LM head bound.
        rules: of the checkpoint's format, whose names the tensors have.
        given: some of the network's tensors or all of them. An embedding or LM head that the model reads from its
            target may be among them if it is the target's.

    Raises:
        CheckpointError: names all tensors that do not fit.
    """
    parameters, problems = dict(model.named_parameters()), []
    of_target = {EMBEDDING: model.embed_weight, LM_HEAD: model.lm_head_weight}
    found: dict[str, Tensor] = {}
    for name, stored in rules.names(given, origin).items():
        tensor, parameter = given[stored], parameters.get(name)
        if parameter is None and name not in of_target:
            problems.append(f"unexpected {stored} {list(tensor.shape)}")
        elif parameter is None:
            if not _equal(tensor, of_target[name]):
                problems.append(f"{stored} is not the target's, which the drafter reads in its place")
        elif tensor.shape != parameter.shape:
            problems.append(f"misshapen {stored} {list(tensor.shape)}, expected {list(parameter.shape)}")
        elif not tensor.is_floating_point() or not bool(tensor.to(parameter.dtype).isfinite().all()):
            problems.append(f"{stored} has values that are no finite numbers in {parameter.dtype}")
        else:
            found[name] = rules.order(name, tensor)
    if problems:
        raise CheckpointError(f"{origin}: {'; '.join(problems)}. Nothing was written: send what the drafter has")
    return found


def whole(model: DraftModel, other: DraftModel, origin: str) -> dict[str, Tensor]:
    """Return the tensors of another drafter by the names of the parameters of the serving one, all of them.

    Raises:
        CheckpointError: some do not fit, or are missing.
    """
    found = fitted(model, TensorRules(), dict(other.named_parameters()), origin)
    if missing := sorted(dict(model.named_parameters()).keys() - found.keys()):
        raise CheckpointError(
            f"{origin}: has no {', '.join(missing)}, which the drafter that serves has of its own; add it to the "
            "checkpoint, or restart the server with this drafter"
        )
    return found


def _equal(tensor: Tensor, of_target: Tensor) -> bool:
    return torch.equal(tensor.to(of_target.device, of_target.dtype), of_target)
