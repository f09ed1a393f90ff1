"""What of a served family's target cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dspark.draft.families import Family
from sglang_dspark.engine.compat.targets import loses_residuals


def target_refusals(family: Family, model_config: Any, window: int) -> Iterator[str]:
    """What is wrong with a target.

    Args:
        model_config: SGLang's, of the target.
        window: tokens that a step may verify per request.
    """
    if (refusal := states_refusal(family)) is not None:
        yield refusal
    limit = _one_rope_limit(model_config.hf_text_config)
    if limit is not None and model_config.context_len + window > limit:
        # SGLang takes the other factors for the whole batch as soon as one of its tokens lies beyond.
        yield (
            f"--model-path: beyond {limit} tokens the target's LongRoPE depends on what else is in a batch, "
            f"so that drafts would change the text; pass --context-length {limit - window} or less"
        )


def states_refusal(family: Family) -> str | None:
    """What is wrong with the hidden states that SGLang returns of this family; None where nothing is."""
    if not loses_residuals(family.architecture):
        return None
    return (
        f"--model-path: this SGLang's {family.architecture} returns hidden states that are not summed up, from "
        "which drafts would hardly ever be right; serve it without --speculative-algorithm"
    )


def _one_rope_limit(text_config: Any) -> int | None:
    """Tokens up to which a target with LongRoPE rotates by its short factors; None for other targets."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    key = "original_max_position_embeddings"
    return int(rope.get(key) or getattr(text_config, key))
