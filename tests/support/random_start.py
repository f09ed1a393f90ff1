"""Starts of servers with drafters of random forms: the warm-up by interpreted kernels, and graphs of two sizes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dspark_kernels import Dispatched, dispatch, kernels_anywhere
from random_drafter import VARIANTS, random_drafter
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang_objects import model_config, partly, table, worker
from stage_loop import GraphLoop

from sglang_dspark.step.state import TargetOutput
from sglang_dspark.worker import kernel_comparison, warm_up
from sglang_dspark.worker.self_check import SelfCheck

SLOTS = 400
CALL_OTHERS = dict.fromkeys(("block_attention", "forward_block_fused"), 10**6) | {"draft_block": 3}
"""Functions whose kernels call other functions, and how often these calls are made."""


def random_form(draw: random.Random) -> dict[str, Any]:
    """Return settings of a drafter: layers, heads, block, windows, kind of Markov head."""
    layers, kv_heads = draw.randint(1, 2), draw.choice((1, 2, 4))
    windowed = draw.random() < 0.3
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice((1, 2, 3)),
        "head_dim": draw.choice((8, 16, 24, 32)),
        "intermediate_size": draw.choice((40, 96, 130)),
        "block_size": draw.randint(1, 6),
        "markov_head_type": draw.choice(("vanilla", "gated", "rnn")),
        "markov_rank": draw.choice((5, 16, 33)),
        "enable_confidence_head": draw.random() < 0.8,
        "confidence_head_with_markov": draw.random() < 0.5,
        "target_layer_ids": draw.choice(([2], [-1, 1, 3])),
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * layers,
        "sliding_window": 5 if windowed else None,
        "attention_bias": draw.random() < 0.3,
    }


class RandomStart(GraphLoop):
    """One start: a drafter of a random form, and a target whose logits follow from the tokens.

    Args:
        seed: of the form and its weights.
        folder: an empty one, for the drafter.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, folder: Path) -> None:
        self._draw = random.Random(seed)
        VARIANTS["random form"] = random_form(self._draw)
        self.most = self._draw.randint(1, 3)
        super().__init__(monkeypatch, [1, self.most], draft=random_drafter(folder, "random form", seed))
        vocab_size, width = self.drafter.config.vocab_size, self.drafter.model.fc.in_features
        generator = torch.Generator().manual_seed(seed)
        self._logits = torch.randn(vocab_size, vocab_size, generator=generator)
        self._features = torch.randn(vocab_size, width, generator=generator)
        self.target = lambda ids: (self._logits[torch.as_tensor(ids)], self._features[torch.as_tensor(ids)])
        self.eager.forward = self.verify
        self.drafter.allocate(SLOTS + 1, torch.float32)
        self.worker = worker(
            max_running_requests=self.most,
            req_to_token_pool=table(self.most, 64),
            token_to_kv_pool=partly(MHATokenToKVPool, size=SLOTS),
            device="cpu",
            dtype=torch.float32,
            model_config=model_config(vocab_size=vocab_size),
            spec_algorithm=None,
            attn_backend=None,
        )
        self.table = self.worker.model_runner.req_to_token_pool.req_to_token

    def verify(self, step: Any, plan: Any) -> TargetOutput:
        logits, features = self.target(plan.input_ids)
        return TargetOutput(LogitsProcessorOutput(next_token_logits=logits), features)

    def check(self, *, warms_up: bool = True) -> SelfCheck:
        """Warm up, capture, and return what was checked; a kernel runs only where it is compared."""
        check, calls = SelfCheck(torch.device("cpu")), Counter[str]()

        def looked_at(function: Dispatched[Any, Any], *args: Any, **kwargs: Any) -> Any:
            name = function.kernel.__name__
            calls[name] += 1
            form = function.kernel if calls[name] <= CALL_OTHERS.get(name, 0) else function.reference
            result = form(*args, **kwargs)
            for observe in tuple(dispatch._observers):
                observe(function, args, kwargs)
            return result

        with (
            kernels_anywhere(),
            torch.no_grad(),
            patch.object(Dispatched, "__call__", looked_at),
            patch.object(kernel_comparison, "_LONG", 150),
        ):
            if warms_up:
                warm_up.warm_up(self.eager, self.worker, self.gamma, self._slots, (), check)
            self.start_graphs()
            warm_up.check_graphs(self.executors, self.worker, self.gamma, check)
            check.finish()
        return check
