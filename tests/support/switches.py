"""Every kind of switch of the draft network, as keys of a canonical config.json of two layers."""

from __future__ import annotations

from typing import Any

from canonical_drafter import GEMMA

_SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
_HEADLESS = {"markov_rank": 0, "markov_head_type": ..., "confidence_head_with_markov": ...}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}}


SWITCHES: dict[str, dict[str, Any]] = {
    "DFlash": _HEADLESS | {"sample_from_anchor": False, "enable_confidence_head": False},
    "layout of DFlash with heads": {"sample_from_anchor": False, "markov_head_type": "gated"},
    "window from the anchor": _SLIDING | {"window_from_anchor": True, "causal_layers": [False, False]},
    "window from the slot": _SLIDING | {"causal_layers": [False, False]},
    "window from the slot, causal": _SLIDING | {"causal_layers": [False, True]},
    "causal block": {"causal_layers": [True, False]},
    "reduced vocabulary": {"draft_vocab_size": 2},
    "reduced vocabulary, gated": {"draft_vocab_size": 2, "markov_head_type": "gated"},
    "YaRN": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "linear RoPE": _rope(rope_type="linear", factor=3.0),
    "Llama 3's RoPE": _rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "proportional RoPE": _rope(rope_type="proportional", partial_rotary_factor=0.5),
    "Gemma's layers": GEMMA,
    "Gemma's layers, values of their own": GEMMA | {"attention_k_eq_v": False, "causal_layers": [True, False]},
    "some pairs rotate": _rope(partial_rotary_factor=0.5, rotary_pairs="whole_head"),
    "biases": {"attention_bias": True},
    "sinks": {"sink_layers": [False, True]},
    "value scale": {"attention_value_scale": 0.4},
    "softcap": {"final_logit_softcapping": 0.5},
    "DFlash 2": {
        "sample_from_anchor": False,
        "markov_head_type": "selector",
        "selector_top_k": 3,
        "conv_kernel_size": 2,
        "conv_group_size": 2,
        "output_multiplier": 1.4,
        "enable_confidence_head": False,
        "confidence_head_with_markov": ...,
    },
    "everything": _SLIDING
    | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    | {
        "sample_from_anchor": False,
        "causal_layers": [True, False],
        "draft_vocab_size": 2,
        "attention_bias": True,
        "sink_layers": [True, True],
        "attention_value_scale": 1.6,
        "final_logit_softcapping": 1.5,
    },
}
