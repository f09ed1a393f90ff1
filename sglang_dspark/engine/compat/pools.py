"""Ask the target's runner for what a drafter needs: hidden states, and room in the K/V pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError

_RECORD = "spec_aux_config"


def _wish(runner: Any, name: str, value: Any) -> None:
    # One that SGLang reads elsewhere would go unnoticed until the first prefill, or until the memory is full.
    wishes = getattr(runner, _RECORD, None)
    if not hasattr(wishes, name):
        raise EngineError(
            f"sglang {installed_sglang()} has no {_RECORD}.{name} in its {type(runner).__name__}, where a drafter asks "
            "for hidden states and for memory; sglang-dspark cannot serve on this release as it is"
        )
    setattr(wishes, name, value)


def request_capture(runner: Any, layers: Sequence[int]) -> None:
    """Have the target's forwards return the outputs of these layers, 0-based.

    Raises:
        EngineError: this SGLang reads such wishes elsewhere.
    """
    _wish(runner, "dflash_use_aux_hidden_state", True)
    _wish(runner, "dflash_target_layer_ids", list(layers))


def make_room(runner: Any, num_layers: int) -> None:
    """Have the K/V pool leave room for so many layers more than the target has, each as large as one of them.

    Raises:
        EngineError: this SGLang reads such wishes elsewhere.
    """
    _wish(runner, "dflash_draft_num_layers", num_layers)
