"""What SGLang's models of targets may lose or find again."""

from __future__ import annotations

from inspect import signature


def loses_residuals(architecture: str) -> bool:
    """Whether hidden states that SGLang returns of such a target lack what its layers have not added up yet."""
    if architecture not in ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"):
        return False
    from sglang.srt.models.gemma3_causal import Gemma3DecoderLayer

    # Where layers hand the sum on beside their own output, the model still captures the output alone.
    return "residual" in signature(Gemma3DecoderLayer.forward).parameters
