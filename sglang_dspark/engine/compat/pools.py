"""Memory pools: who hands out slots, and where the target's runner keeps what a drafter wants of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_ALLOCATION = "sglang.srt.mem_cache.allocation"
_COMMON = "sglang.srt.mem_cache.common"

alloc_token_slots = import_module(_ALLOCATION if find_spec(_ALLOCATION) else _COMMON).alloc_token_slots
"""``alloc_token_slots(tree_cache, number)``: as many K/V slots, of cached prefixes if need be."""


def _wishes(runner: Any) -> Any:
    # Attributes of the runner itself, before they got a record of their own. Writing them to the wrong one of the two
    # would go unnoticed until the first prefill, hence check_capture.
    return getattr(runner, "spec_aux_config", runner)


def request_capture(runner: Any, layers: Sequence[int]) -> None:
    """Have the target's forwards return the outputs of these layers, 0-based."""
    wishes = _wishes(runner)
    wishes.dflash_use_aux_hidden_state = True
    wishes.dflash_target_layer_ids = list(layers)


def make_room(runner: Any, num_layers: int) -> None:
    """Have the K/V pool leave room for so many layers more than the target has, each as large as one of them."""
    _wishes(runner).dflash_draft_num_layers = num_layers
