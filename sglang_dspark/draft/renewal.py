"""Other weights for a drafter that serves: checked as a whole, before any of them is written over the old ones."""

from collections.abc import Iterable, Mapping
from dataclasses import fields

import torch
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats.tensors import TensorRules
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import FILE
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD, listed_tokens
from sglang_dspark.errors import CheckpointError

TOKEN_IDS = "token_ids"
"""Name of the list of proposed tokens among the tensors of a network."""
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
    if serving.num_proposed != other.num_proposed:
        different.append(f"proposed tokens ({FILE})={other.num_proposed}, serving {serving.num_proposed}")
    if different:
        raise CheckpointError(
            f"{other.path}: differs from the drafter that serves: {'; '.join(different)}. Weights alone can be "
            "replaced: restart the server with this drafter, or train one of the same form"
        )


def _values(serving: DraftConfig, other: DraftConfig) -> Iterable[tuple[str, object, object]]:
    names = [field.name for field in fields(DraftConfig) if field.name not in _OF_TRAINING]
    return [(name, getattr(serving, name), getattr(other, name)) for name in names]


def fitted(
    model: DraftModel,
    rules: TensorRules,
    given: Mapping[str, Tensor],
    origin: str,
    *,
    head: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return tensors by the names of the network's parameters, and :data:`TOKEN_IDS`; the model stays as it is.

    Args:
        model: serving, its embedding and LM head bound.
        rules: of the checkpoint's format, whose names the tensors have.
        given: some of the network's tensors or all of them. An embedding or LM head that the model reads from its
            target may be among them if it is the target's.
        head: the target's whole LM head, if the model reads the rows of it that its list of tokens names.
        token_ids: the list of tokens, if it is not among the tensors.

    Raises:
        CheckpointError: names all tensors that do not fit.
    """
    parameters, problems = dict(model.named_parameters()), []
    listing = {name.removeprefix("model."): tensor for name, tensor in given.items()}
    token_ids = token_ids if token_ids is not None else listed_tokens(listing, model.config, origin)
    found: dict[str, Tensor] = {} if token_ids is None else {TOKEN_IDS: token_ids}
    rows = model.lm_head_weight if head is None or token_ids is None else head[token_ids.to(head.device)]
    of_target = {EMBEDDING: model.embed_weight, LM_HEAD: rows}
    for name, stored in rules.names(given, origin).items():
        tensor, parameter = given[stored], parameters.get(name)
        if parameter is None and name not in of_target:
            problems.append(f"unexpected {stored} {list(tensor.shape)}")
        elif parameter is None:
            if not _equal(tensor, of_target[name]):
                problems.append(f"{stored} is not the target's, which the drafter reads in its place")
        elif tensor.shape != parameter.shape:
            problems.append(f"misshapen {stored} {list(tensor.shape)}, expected {list(parameter.shape)}")
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            problems.append(f"{stored} is stored as {tensor.dtype}: send weights that are not quantised")
        elif not bool(tensor.to(parameter.dtype).isfinite().all()):
            problems.append(f"{stored} has values that are no finite numbers in {parameter.dtype}")
        else:
            found[name] = rules.order(name, tensor)
    if problems:
        raise CheckpointError(f"{origin}: {'; '.join(problems)}. Nothing was written: send what the drafter has")
    return found


def whole(
    model: DraftModel, other: DraftModel, origin: str, *, head: Tensor | None, token_ids: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors of another drafter by the names of the serving one's, as :func:`fitted` does, all of them.

    Raises:
        CheckpointError: some do not fit, or are missing.
    """
    given = dict(other.named_parameters())
    found = fitted(model, TensorRules(), given, origin, head=head, token_ids=token_ids)
    if missing := sorted(dict(model.named_parameters()).keys() - found.keys()):
        raise CheckpointError(
            f"{origin}: has no {', '.join(missing)}, which the drafter that serves has of its own; add it to the "
            "checkpoint, or restart the server with this drafter"
        )
    return found


def _equal(tensor: Tensor, of_target: Tensor) -> bool:
    return torch.equal(tensor.to(of_target.device, of_target.dtype), of_target)
