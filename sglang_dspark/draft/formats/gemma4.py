"""Keys of Gemma 4's layers.

DeepSpec copies the text configuration of Gemma 4 12B, and builds every layer of the drafter as the target's layers with
full attention are built.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dspark.draft.config import ARCHITECTURES
from sglang_dspark.draft.formats import qwen3
from sglang_dspark.draft.formats.content import Content

_NEUTRAL: Mapping[str, Any] = {
    **{key: served for key, served in qwen3.NEUTRAL.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_kv_shared_layers": 0,
}
_SHARED = "attention_k_eq_v"
_OF_FULL_ATTENTION = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def describes(content: Content) -> bool:
    """Return whether a file of DeepSpec is about such layers."""
    return ARCHITECTURES["gemma4"] in (content.find("architectures") or ())


def shape(content: Content) -> None:
    """Read the sizes of the layers; their K/V heads are those of full attention if values are the keys."""
    shared = content.find(_SHARED, default=False)
    keys = {**_OF_FULL_ATTENTION, _SHARED: _SHARED}
    if shared is not True:
        content.skip(keys.pop("num_key_value_heads"))
    content.skip(*_OF_FULL_ATTENTION)
    qwen3.shape(content, neutral=_NEUTRAL, keys=keys)
    content.values |= {"backbone": "gemma4", _SHARED: shared}
