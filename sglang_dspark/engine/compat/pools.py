"""Memory pools: who hands out slots, and where the target's runner keeps what a drafter wants of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError

_ALLOCATION = "sglang.srt.mem_cache.allocation"
_COMMON = "sglang.srt.mem_cache.common"

alloc_token_slots = import_module(_ALLOCATION if find_spec(_ALLOCATION) else _COMMON).alloc_token_slots
"""``alloc_token_slots(tree_cache, number)``: as many K/V slots, of cached prefixes if need be."""


def _wish(runner: Any, name: str, value: Any) -> None:
    # Attributes of the runner itself, before they got a record of their own. One that is not there is read elsewhere:
    # writing it would go unnoticed until the first prefill, or until the memory is full.
    wishes = getattr(runner, "spec_aux_config", runner)
    if not hasattr(wishes, name):
        raise EngineError(
            f"sglang {installed_sglang()} has no {name} in its {type(wishes).__name__}, where a drafter asks for "
            "hidden states and for memory; sglang-dspark cannot serve on this release as it is"
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
