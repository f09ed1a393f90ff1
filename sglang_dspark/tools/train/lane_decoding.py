"""Fast batched decoding for GPUs: a fixed number of lanes, one CUDA graph, and a look at the result now and then.

Step by step from Python, a small model keeps a GPU waiting: launching its kernels takes longer than running them. Here
every tensor of a step keeps its shape and place, so that the whole forward is one launch: each lane has a stretch of
K/V memory and writes its next token at its own position, and a mask says how far it may read. Which lanes have ended is
known on the device; the host asks once in `_STEPS_PER_LOOK` steps, takes the finished texts and gives the idle lanes to
the next prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from dspark_kernels import to_device
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, CacheLayerMixin

from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.target import GROUPED_FAMILIES, Target

logger = logging.getLogger(__name__)

_STEPS_PER_LOOK = 16
# Idle lanes wait for company until this share of them is idle: filling them costs as much as a few steps.
_REFILL_SHARE = 0.125
# Prompt tokens, padding included, that go through the target together.
_PREFILL_TOKENS = 65_536
# K/V memory is a multiple of this many tokens per lane, which is what fused attention with a mask is fast for.
_CAPACITY_UNIT = 64
# Share of the free memory for K/V and for the logits of a step, and the most lanes that still help.
_MEMORY_SHARE = 0.4
_MAX_LANES = 2048
# Bytes per logit: 16-bit, float32, and noise.
_LOGIT_BYTES = 12


def reason_against_lanes(target: Target) -> str | None:
    """Why `target` cannot be decoded in lanes; None where it can."""
    layer_types = set(getattr(target.config, "layer_types", None) or ())
    if target.config.model_type not in GROUPED_FAMILIES:
        return f"{target.config.model_type} is not among {', '.join(GROUPED_FAMILIES)}"
    if layer_types - {"full_attention"}:
        return f"it has layers of type {', '.join(sorted(layer_types - {'full_attention'}))}"
    return None


def affordable_lanes(target: Target, capacity: int, free_bytes: int) -> int:
    """Lanes of `capacity` tokens that fit a device with so much free memory, at least 1."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * target.num_layers * config.num_key_value_heads * head_dim * target.dtype.itemsize
    per_lane = per_token * capacity + _LOGIT_BYTES * target.vocab_size
    return max(1, min(_MAX_LANES, int(free_bytes * _MEMORY_SHARE) // per_lane))


def lane_capacity(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Tokens per lane that any of `prompts` needs with its answer."""
    tokens = max(map(len, prompts)) + max_new_tokens
    return -(-tokens // _CAPACITY_UNIT) * _CAPACITY_UNIT


class LaneDecoder:
    """Decodes any number of prompts in `num_lanes` lanes of `capacity` tokens each.

    Without CUDA, or where the step cannot be captured, it computes the same without a graph.
    """

    def __init__(self, target: Target, num_lanes: int, capacity: int) -> None:
        device = target.device
        self.num_lanes, self.capacity = num_lanes, capacity
        self._target, self._device = target, device
        self._table = _LaneTable(num_lanes, capacity, device)
        self._cache = _LaneCache(target.num_layers, self._table)
        self._ids = torch.zeros(num_lanes, dtype=torch.long, device=device)  # newest token, at `_table.positions`
        self._limits = torch.zeros(num_lanes, dtype=torch.long, device=device)  # position of the last token allowed
        self._active = torch.zeros(num_lanes, dtype=torch.bool, device=device)
        self._heat = torch.zeros(num_lanes, device=device)
        self._texts = torch.zeros(num_lanes, capacity, dtype=torch.long, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._stop_ids = torch.tensor(sorted(target.stop_ids), dtype=torch.long, device=device)
        self._logits: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        generator: torch.Generator,
        on_progress: Callable[[float], None] = lambda num_texts: None,
    ) -> list[CorpusRow]:
        """As `sglang_dspark.tools.train.decoding.decode`; every prompt with its answer has to fit the capacity.

        `on_progress` counts whole texts.
        """
        noise = torch.Generator(self._device).manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        texts: dict[int, CorpusRow] = {}
        waiting = list(range(len(prompts)))
        working: dict[int, int] = {}  # lane -> prompt
        with _unique_writes(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            while waiting or working:
                idle = self.num_lanes - len(working)
                if waiting and (not working or idle >= self.num_lanes * _REFILL_SHARE):
                    lanes = [lane for lane in range(self.num_lanes) if lane not in working][: len(waiting)]
                    chosen, waiting = waiting[: len(lanes)], waiting[len(lanes) :]
                    working.update(zip(lanes, chosen, strict=True))
                    self._fill(lanes, [prompts[i] for i in chosen], [temperatures[i] for i in chosen], max_new_tokens)
                self._logits = self._logits or self._ready()
                hot = any(temperatures[i] > 0 for i in working.values())
                for _ in range(_STEPS_PER_LOOK):
                    self._step(self._logits(), noise if hot else None)
                for lane, text in self._finished(list(working)):
                    prompt = working.pop(lane)
                    texts[prompt] = CorpusRow(text, len(prompts[prompt]))
                    on_progress(1)
        return [texts[i] for i in range(len(prompts))]

    def _fill(
        self, lanes: Sequence[int], prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_new_tokens: int
    ) -> None:
        """Give idle `lanes` to `prompts`."""
        size = max(1, _PREFILL_TOKENS // max(map(len, prompts)))
        for start in range(0, len(lanes), size):
            chunk = prompts[start : start + size]
            lens = torch.tensor([len(prompt) for prompt in chunk])
            ids = torch.zeros(len(chunk), int(lens.max()), dtype=torch.long)
            for row, prompt in zip(ids, chunk, strict=True):
                row[: len(prompt)] = torch.tensor(prompt)
            last = ids[torch.arange(len(chunk)), lens - 1]
            heat = torch.tensor(temperatures[start : start + size], dtype=torch.float32)
            at, lens, ids, last, heat = (
                to_device(part, self._device)
                for part in (torch.tensor(lanes[start : start + size]), lens, ids, last, heat)
            )
            # Causal attention: padding on the right reaches no token of a prompt, and is overwritten later.
            self._table.filling = at
            self._target.backbone(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._table.filling = None
            # The last token of the prompt goes through the target once more, as the first step of its lane.
            self._ids[at], self._table.positions[at] = last, lens - 1
            self._limits[at] = lens - 1 + max_new_tokens
            self._active[at] = True
            self._heat[at] = heat
            self._texts[at, : ids.shape[1]] = ids

    def _step(self, logits: Tensor, noise: torch.Generator | None) -> None:
        """Append a token to every active lane; without `noise` all of them are greedy."""
        logits = logits.float()
        if noise is not None:
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            gumbel = torch.empty_like(logits).exponential_(generator=noise).log_().neg_()
            hot = (self._heat > 0)[:, None]
            logits = torch.where(hot, gumbel.add_(logits / torch.where(hot, self._heat[:, None], 1.0)), logits)
        tokens = torch.where(self._active, logits.argmax(-1), self._ids)
        positions = self._table.positions + self._active
        self._texts.scatter_(1, positions[:, None], tokens[:, None])
        self._active &= ~(tokens[:, None] == self._stop_ids).any(-1) & (positions < self._limits)
        self._ids.copy_(tokens)
        self._table.positions.copy_(positions)

    def _finished(self, lanes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Those of `lanes` that have ended, with their texts; waits for the device."""
        active, lens = self._active.tolist(), (self._table.positions + 1).tolist()
        ended = [lane for lane in lanes if not active[lane]]
        if not ended:
            return []
        texts = self._texts[to_device(torch.tensor(ended), self._device)].cpu()
        return [(lane, text[: lens[lane]].clone()) for lane, text in zip(ended, texts, strict=True)]

    def _forward(self) -> Tensor:
        """Logits ``[lanes, V]`` after the newest token of every lane, which enters the cache."""
        positions = self._table.positions[:, None]
        mask = torch.zeros(self.num_lanes, self.capacity, dtype=self._target.dtype, device=self._device)
        mask.masked_fill_(self._columns > positions, float("-inf"))
        # cuDNN plans anew for every shape, and the flash kernels know no mask.
        kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        with kernels if self._device.type == "cuda" else nullcontext():
            output = self._target.backbone(
                input_ids=self._ids[:, None],
                attention_mask=mask[:, None, None],
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
        return nn.functional.linear(output.last_hidden_state[:, 0], self._target.lm_head_weight)

    def _ready(self) -> Callable[[], Tensor]:
        """`_forward`, as a single launch where that is possible."""
        if self._device.type != "cuda":
            return self._forward
        try:
            return self._captured()
        except RuntimeError as error:
            logger.warning(
                "the target's decoding step cannot be captured in a CUDA graph (%s); decoding is slower without",
                str(error).splitlines()[0],
            )
            return self._forward

    def _captured(self) -> Callable[[], Tensor]:
        # Libraries set themselves up on their first calls, which must not be part of a graph. Running the forward more
        # than once changes nothing: it writes the same K/V to the same place.
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._forward()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@contextmanager
def _unique_writes() -> Iterator[None]:
    """Without torch's deterministic algorithms: no two lanes write to one place, so plain writes are deterministic."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


class _LaneTable:
    """Where the lanes are; all layers of a `_LaneCache` read it."""

    def __init__(self, num_lanes: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lanes = torch.arange(num_lanes, device=device)
        self.positions = torch.zeros(num_lanes, dtype=torch.long, device=device)
        self.filling: Tensor | None = None  # lanes whose prompts are going through the target; None = a step of all


class _LaneLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[lanes, kv_heads, capacity, head_dim]``."""

    is_sliding = False

    def __init__(self, table: _LaneTable) -> None:
        super().__init__()
        self._table = table

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros: what is masked has weight 0, and 0 times whatever memory held before may not be a number.
        shape = (len(self._table.lanes), key_states.shape[1], self._table.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        table = self._table
        if table.filling is not None:
            self.keys[table.filling, :, : key_states.shape[2]] = key_states
            self.values[table.filling, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        self.keys[table.lanes, :, table.positions] = key_states[:, :, 0]
        self.values[table.lanes, :, table.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self._table.capacity

    def get_max_length(self) -> int:
        """The same, as later releases of transformers call it."""
        return self._table.capacity


class _LaneCache(Cache):
    def __init__(self, num_layers: int, table: _LaneTable) -> None:
        super().__init__(layers=[_LaneLayer(table) for _ in range(num_layers)])
