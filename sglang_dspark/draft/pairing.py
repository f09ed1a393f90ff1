"""Decides whether a drafter belongs to a target, from the two configurations, before anything is loaded."""

from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import CheckpointError


def lacks_own(draft: DraftConfig, layer: str, reason: str) -> CheckpointError:
    """Return the error of a drafter that would have to read a layer of its target, and cannot.

    Args:
        layer: ``embed_tokens`` or ``lm_head``.
        reason: why the target's cannot be read, as in "is quantised (fp8)".
    """
    return CheckpointError(
        f"{draft.origin}: has no {layer}.weight of its own, and the target's {layer} {reason}; use a drafter with a "
        f"{layer} of its own, or a target whose {layer} is stored in plain floating point"
    )


def check_dimensions(draft: DraftConfig, target: Any) -> None:
    """Refuse a drafter that was made for another target, of whatever family.

    Raises:
        CheckpointError: naming the first dimension that differs.
    """
    depth = target.num_hidden_layers
    for key, target_key, value in (
        ("hidden_size", "hidden_size", target.hidden_size),
        ("vocab_size", "vocab_size", target.vocab_size),
        ("num_target_layers", "num_hidden_layers", depth),
    ):
        if getattr(draft, key) not in (None, value):
            raise CheckpointError(
                f"{draft.origin}: {key}={getattr(draft, key)}, but the target has {target_key}={value}; use the draft "
                "that was trained for this target"
            )
    if draft.target_layer_ids[-1] > depth - 2:
        raise CheckpointError(
            f"{draft.origin}: reads the output of layer {draft.target_layer_ids[-1]}, counted from 0, of a target with "
            f"{depth} layers; layers up to {depth - 2} can be read. Use another drafter of this target"
        )
