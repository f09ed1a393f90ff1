"""Batched decoding with the target in process, which keeps the hidden states that the drafter trains on.

The states come for free while a text is written, so a corpus made here never runs through the target a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sglang_dspark.train.target import Target

# Rows that ended stay in the batch until this share of it is idle: dropping them copies the whole KV cache.
_COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Continuation:
    """One prompt, what the target wrote after it, and its states at every position but the last."""

    prompt_ids: list[int]
    output_ids: list[int]
    features: Tensor  # [prompt + output - 1, m * d]
    last_hidden: Tensor  # [prompt + output - 1, d]


@torch.inference_mode()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[Continuation]:
    """Continue every prompt until a stop token or `max_new_tokens`.

    Args:
        prompts: token ids, one list per row; similar lengths waste least.
        temperatures: per row; 0 takes the argmax.
        max_new_tokens: most tokens written per row; the stop token is kept.
        generator: CPU generator for the draws.
    """
    bs, width, device = len(prompts), max(map(len, prompts)), target.device
    ids = torch.zeros(bs, width, dtype=torch.long)
    mask = torch.zeros(bs, width + max_new_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids, mask, positions = ids.to(device), mask.to(device), positions.to(device)
    cache = _PreallocatedCache(target.model.config.num_hidden_layers, width + max_new_tokens)
    states = target.forward(ids, mask[:, :width], positions[:, :width], cache)
    # The columns of one state row: the tapped features, then the last hidden state.
    num_features = states.features.shape[-1]
    kept = torch.zeros(bs, width + max_new_tokens, num_features + target.hidden_size, dtype=target.dtype)
    kept[:, :width] = torch.cat([states.features, states.last_hidden], dim=-1)

    outputs: list[list[int]] = [[] for _ in prompts]
    rows = torch.arange(bs)  # batch row -> prompt
    active = torch.ones(bs, dtype=torch.bool)
    heat = torch.tensor(temperatures, dtype=torch.float32)
    for column in range(width, width + max_new_tokens):
        tokens = _draw(target.logits(states.last_hidden[:, -1]), heat[rows], generator)
        for i in active.nonzero().flatten().tolist():
            outputs[rows[i]].append(int(tokens[i]))
        active &= ~torch.isin(tokens, torch.tensor(sorted(target.stop_ids)))
        if not active.any() or column == width + max_new_tokens - 1:
            break
        if active.float().mean() < _COMPACT_BELOW:
            keep = active.nonzero().flatten()
            rows, tokens, active = rows[keep], tokens[keep], active[keep]
            cache.keep_rows(keep.to(device))
        device_rows = rows.to(device)
        states = target.forward(
            tokens.to(device)[:, None],
            mask[device_rows, : column + 1],
            positions[device_rows, column : column + 1],
            cache,
        )
        kept[rows, column] = torch.cat([states.features, states.last_hidden], dim=-1)[:, 0].to(kept.device)
    return [
        _continuation(list(prompt), output, kept[row, width - len(prompt) :], num_features)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _continuation(prompt: list[int], output: list[int], states: Tensor, num_features: int) -> Continuation:
    states = states[: len(prompt) + len(output) - 1]
    return Continuation(prompt, output, states[:, :num_features].clone(), states[:, num_features:].clone())


def _draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens ``[bs]`` on the CPU, the argmax where the temperature is 0."""
    logits = logits.cpu()
    tokens = logits.argmax(-1)
    hot = temperatures.nonzero().flatten()
    if hot.numel():
        probs = torch.softmax(logits[hot] / temperatures[hot, None], dim=-1)
        tokens[hot] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return tokens


class _PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer of the final length, so that a step appends without copying."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        bs, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(bs, heads, self._capacity, head_dim)
        self.values = value_states.new_empty(bs, heads, self._capacity, head_dim)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return -1

    def keep_rows(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]


class _PreallocatedCache(Cache):
    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_PreallocatedLayer(capacity) for _ in range(num_layers)])

    def keep_rows(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep_rows(rows)
