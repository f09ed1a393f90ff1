"""Batched decoding with the target in process, which can keep the hidden states that the drafter trains on.

The states come for free while a text is written: a corpus that stores them never runs through the target again. They
take far more room than the text, so that pays for small targets on a slow machine only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from dspark_kernels import inverse_cdf
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sglang_dspark.tools.train.rows import CorpusRow, StoredRow
from sglang_dspark.tools.train.target import Target, TargetStates

# Rows that ended stay in the batch until this share of it is idle: dropping them copies the whole KV cache.
_COMPACT_BELOW = 0.75
# Columns by which the KV cache grows. It is read whole, as matrix products need it in one piece; what is not written
# yet is masked.
_GROWTH = 64
# Tokens of prompts that go through the target together, padding included. More would not stay in a CPU's caches.
_PREFILL_TOKENS = 8192
_PREFILL_TOKENS_CPU = 1024


@torch.no_grad()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    generator: torch.Generator,
    *,
    keep_states: bool = False,
    on_progress: Callable[[float], None] = lambda num_texts: None,
) -> list[CorpusRow]:
    """Continue every prompt until a stop token or `max_new_tokens`.

    Args:
        prompts: token ids, one list per row; similar lengths waste least.
        temperatures: per row; 0 takes the argmax.
        max_new_tokens: most tokens written per row; the stop token is kept.
        generator: CPU generator for the draws; a target elsewhere draws from one seeded by it.
        keep_states: return `StoredRow` with the states at every position but the last, on the CPU.
        on_progress: called with the texts written since the last call; a text of `max_new_tokens` tokens is written in
            as many equal parts, and one that ends early at once when the last one does.
    """
    bs, width, device = len(prompts), max(map(len, prompts)), target.device
    ids = torch.zeros(bs, width, dtype=torch.long)
    mask = torch.zeros(bs, _capacity(width + max_new_tokens), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    mask[:, width:] = 0  # until it is written
    generator = _generator_on(device, generator)
    ids, mask, positions = ids.to(device), mask.to(device), positions.to(device)
    cache = _GrowingCache(target.num_layers)
    kept = _KeptStates(target, bs, width + max_new_tokens) if keep_states else None
    last_hidden = _prefill(target, prompts, ids, mask, positions, cache, kept)

    outputs: list[list[int]] = [[] for _ in prompts]
    rows = torch.arange(bs)  # batch row -> prompt
    active = torch.ones(bs, dtype=torch.bool)
    heat = torch.tensor(temperatures, dtype=torch.float32)
    stop_ids = torch.tensor(sorted(target.stop_ids), dtype=torch.long)
    for column in range(width, width + max_new_tokens):
        tokens = _draw(target.logits(last_hidden), heat[rows], generator)
        for i in active.nonzero().flatten().tolist():
            outputs[rows[i]].append(int(tokens[i]))
        active &= ~torch.isin(tokens, stop_ids)
        on_progress(bs / max_new_tokens)
        if not active.any() or column == width + max_new_tokens - 1:
            break
        if active.float().mean() < _COMPACT_BELOW:
            keep = active.nonzero().flatten()
            rows, tokens, active = rows[keep], tokens[keep], active[keep]
            cache.keep_rows(keep.to(device))
        device_rows = rows.to(device)
        mask[:, column] = 1
        states = target.forward(
            tokens.to(device)[:, None],
            mask[device_rows, : _capacity(column + 1)],
            positions[device_rows, column : column + 1],
            cache,
        )
        last_hidden = states.last_hidden[:, -1]
        if kept is not None:
            kept.add(rows, column, states)
    on_progress(bs * (width + max_new_tokens - 1 - column) / max_new_tokens)
    texts = [(torch.tensor([*prompt, *output]), len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)]
    if kept is None:
        return [CorpusRow(*text) for text in texts]
    return [
        StoredRow(text, prompt_len, *kept.of_row(row, width - prompt_len, len(text) - 1))
        for row, (text, prompt_len) in enumerate(texts)
    ]


def _prefill(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ids: Tensor,  # [bs, width]
    mask: Tensor,  # [bs, width or more], as is `positions`
    positions: Tensor,
    cache: _GrowingCache,
    kept: _KeptStates | None,
) -> Tensor:
    """Run the target over the prompts, in pieces of similar length; their last hidden states ``[bs, d]``."""
    bs, width = ids.shape
    last_hidden = target.lm_head_weight.new_empty(bs, target.hidden_size)
    most_tokens = _PREFILL_TOKENS_CPU if target.device.type == "cpu" else _PREFILL_TOKENS
    for piece, piece_width in _prompt_pieces(prompts, most_tokens):
        part, piece_cache = slice(width - piece_width, width), _GrowingCache(target.num_layers)
        piece_mask = F.pad(mask[piece, part], (0, _capacity(piece_width) - piece_width))
        states = target.forward(ids[piece, part], piece_mask, positions[piece, part], piece_cache)
        last_hidden[piece] = states.last_hidden[:, -1]
        cache.take(piece, bs, width, piece_cache)
        if kept is not None:
            kept.add(piece, width - piece_width, states)
    return last_hidden


class _KeptStates:
    """States of all rows and columns of a batch, on the CPU."""

    def __init__(self, target: Target, bs: int, columns: int) -> None:
        self._features, self._last_hidden = (
            torch.zeros(bs, columns, size * target.hidden_size, dtype=target.dtype) for size in (len(target.tap_ids), 1)
        )

    def add(self, rows: Tensor, column: int, states: TargetStates) -> None:
        """Keep the states of some rows at `column` and the columns behind it."""
        part = slice(column, column + states.features.shape[1])
        self._features[rows, part] = states.features.cpu()
        self._last_hidden[rows, part] = states.last_hidden.cpu()

    def of_row(self, row: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Features and last hidden states of `length` columns from `start` on."""
        part = slice(start, start + length)
        return self._features[row, part].clone(), self._last_hidden[row, part].clone()


def _generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    if device.type == "cpu":
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (1,), generator=generator)))


def _prompt_pieces(prompts: Sequence[Sequence[int]], most_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """Rows of similar length that go through the target together, and the length of the longest of them."""
    piece: list[int] = []
    for row in sorted(range(len(prompts)), key=lambda row: len(prompts[row]), reverse=True):
        if piece and (len(piece) + 1) * len(prompts[piece[0]]) > most_tokens:
            yield torch.tensor(piece), len(prompts[piece[0]])
            piece = []
        piece.append(row)
    yield torch.tensor(piece), len(prompts[piece[0]])


def _draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens ``[bs]`` on the CPU, the argmax where the temperature is 0; logits and generator share a device."""
    tokens = logits.argmax(-1)
    hot = temperatures.nonzero().flatten().to(logits.device)
    if hot.numel():
        probs = torch.softmax(logits[hot] / temperatures.to(logits.device)[hot, None], dim=-1)
        # One number decides a row. torch.multinomial draws one per token, which takes a CPU as long as half the target.
        uniforms = torch.rand(len(hot), dtype=torch.float64, device=logits.device, generator=generator)
        tokens[hot] = inverse_cdf(probs, uniforms)
    return tokens.cpu()


class _GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers that grow by `_GROWTH` columns and are read whole."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._length
        self._grow(start + key_states.shape[-2])
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys, self.values

    def _grow(self, length: int) -> None:
        self._length = length
        missing = _capacity(length) - self.keys.shape[-2]
        if missing > 0:
            # Nothing is seen of a column before it is written, but what stands there has to be numbers.
            self.keys, self.values = F.pad(self.keys, (0, 0, 0, missing)), F.pad(self.values, (0, 0, 0, missing))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _capacity(self._length + query_length), 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        """The same, as later releases of transformers call it."""
        return -1

    def keep_rows(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def take(self, rows: Tensor, bs: int, length: int, layer: _GrowingLayer) -> None:
        """Put what `layer` holds of some of the `bs` rows into the columns before `length`."""
        if not self.is_initialized:
            self.lazy_initialization(*(x.new_empty(bs, *x.shape[1:]) for x in (layer.keys, layer.values)))
            self._grow(length)
        taken = layer.get_seq_length()
        part = slice(length - taken, length)
        self.keys[rows, :, part], self.values[rows, :, part] = layer.keys[:, :, :taken], layer.values[:, :, :taken]


class _GrowingCache(Cache):
    def __init__(self, num_layers: int) -> None:
        self._layers_of_rows = [_GrowingLayer() for _ in range(num_layers)]
        super().__init__(layers=self._layers_of_rows)

    def keep_rows(self, rows: Tensor) -> None:
        for layer in self._layers_of_rows:
            layer.keep_rows(rows)

    def take(self, rows: Tensor, bs: int, length: int, cache: _GrowingCache) -> None:
        for layer, other in zip(self._layers_of_rows, cache._layers_of_rows, strict=True):
            layer.take(rows, bs, length, other)


def _capacity(length: int) -> int:
    """Columns of a cache that holds so many."""
    return math.ceil(length / _GROWTH) * _GROWTH
