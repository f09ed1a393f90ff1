"""What of a served family's target cannot be served."""

from __future__ import annotations

from typing import Any


def rope_refusal(model_config: Any, window: int) -> str | None:
    """Return what is wrong with how a target rotates; None where nothing is.

    Args:
        model_config: SGLang's, of the target.
        window: tokens that a step may verify per request.
    """
    limit = _one_rope_limit(model_config.hf_text_config)
    if limit is None or model_config.context_len + window <= limit:
        return None
    # SGLang takes the other factors for the whole batch as soon as one of its tokens lies beyond.
    return (
        f"--model-path: beyond {limit} tokens the target's LongRoPE depends on what else is in a batch, "
        f"so that drafts would change the text; pass --context-length {limit - window} or less"
    )


def _one_rope_limit(text_config: Any) -> int | None:
    """Tokens up to which a target with LongRoPE rotates by its short factors; None for other targets."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    key = "original_max_position_embeddings"
    return int(rope.get(key) or getattr(text_config, key))
