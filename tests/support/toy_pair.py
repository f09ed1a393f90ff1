"""A pair with a vocabulary of three tokens, served by the real stages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from dspark_kernels import Adjustment
from dspark_kernels.sampling import FilterParams, target_probs
from golden_server import DRAFT
from literal import literal_adjust
from stage_loop import StageLoop

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.scheduling.sps_table import SpsTable

V, GAMMA, D = 3, 2, 8
TAPS = (-1, 1)


def toy_drafter(switches: Mapping[str, Any]) -> DraftModel:
    """Random weights, so spread out that its distribution is far from the target's; the confidence head says something.

    Args:
        switches: of its network, as keys of config.json; ``...`` leaves a key out. They are for two layers.
    """
    config = json.loads((DRAFT / "config.json").read_text()) | {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 12,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2 if switches else 1,
        "layer_types": None,
        "mask_token_id": 0,
        "block_size": GAMMA + (not switches.get("sample_from_anchor", True)),
        "markov_rank": 2,
        "target_layer_ids": list(TAPS),
        **switches,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    generator = torch.Generator().manual_seed(4)
    model = DraftModel(read_content(config, origin="toy").config, own_embedding=True, own_lm_head=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.9 if "markov" in name or "confidence" in name else 0.6
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if model.token_ids is not None:
            model.token_ids.copy_(1 + torch.arange(len(model.token_ids)))
    return model.freeze() if switches else model.eval()


_usual = cache(lambda: toy_drafter({}))


_GENERATOR = torch.Generator().manual_seed(7)
_LOGITS = torch.randn((V, V, V), generator=_GENERATOR)  # by the last two tokens
_STATES = torch.randn((V, V, len(TAPS) * D), generator=_GENERATOR)


def toy_target(ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and tapped states [n, taps * d] of all tokens; each depends on the token and its predecessor."""
    before, last = torch.tensor([0, *ids[:-1]]), torch.tensor(ids)
    return _LOGITS[before, last], _STATES[before, last]


class ToyLoop(StageLoop):
    """Serves the toy pair, with another drafter where one is given."""

    def __init__(self, table: SpsTable | None = None, drafter: DraftModel | None = None, **options) -> None:
        self.set_up(drafter or _usual(), toy_target, table, options, lookup=True)


def target_distribution(
    prompt: Sequence[int], first: int, length: int, params: FilterParams, adjustment: Adjustment | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``prompt`` and ``first`` by ``length`` tokens, token by token."""
    probabilities = {}
    for text in itertools.product(range(V), repeat=length):
        probability = 1.0
        for index, token in enumerate(text):
            output = [first, *text[:index]]
            logits = toy_target([*prompt, *output])[0][-1]
            if adjustment is not None:
                logits = torch.tensor(literal_adjust(logits.tolist(), adjustment, output))
            probability *= float(target_probs(logits[None], params)[0, token])
        probabilities[text] = probability
    return probabilities
