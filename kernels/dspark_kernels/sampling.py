"""How requests sample: their parameters, the distribution that follows from them, and one draw per row.

Parameters are tensors on the device, and what the host knows about them stays on the host: which rows are greedy,
sampled or seeded, and which filters occur. So every stage chooses its cheapest form without a read from the device.

The distribution is that of SGLang's pytorch sampling backend: softmax(logits / T) in float32; top-k and top-p jointly
on the sorted probabilities (a token stays when fewer than k tokens precede it and their mass is at most p); min-p
relative to the most likely token; renormalise.

SGLang leaves it to the sort which of several equally likely tokens survive at the cut. 16-bit logits tie often, and a
seeded request must not depend on the other requests of its batch, so here the lowest token id wins.

At the end stand the device functions by which the walk's launch draws a slot's sampled tokens: the part, the tile and
the column where the cumulative sum crosses a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from dspark_kernels.noise import exponential, exponential_at, signed64
from dspark_kernels.preparation import to_device

NO_TOP_K = 1 << 30  # SGLang's encoding of "no top-k"
GREEDY_TEMPERATURE = 1e-6  # below this SGLang decodes greedily
# Any higher one gives the same distribution, and float32 holds this one and its inverse: a forbidden token has a logit
# of -inf, which infinity would divide into NaN, and 0 would multiply into it.
HIGHEST_TEMPERATURE = 1e30


@dataclass(frozen=True)
class FilterParams:
    """Temperature and filters that turn a row of logits into the distribution a token is drawn from.

    Attributes:
        temperatures: [n] float32; 0 for greedy rows.
        top_ks: [n] int64, >= 1; ``NO_TOP_K`` keeps everything.
        top_ps: [n] float32 in (0, 1]; 1 keeps everything.
        min_ps: [n] float32 in [0, 1]; 0 keeps everything.
        max_kept: host bound on the tokens that top-k and top-p leave in any row that has one of them; 0 when none has.
        any_min_p: whether any row has a min-p filter.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    max_kept: int
    any_min_p: bool

    def expand(self, row_index: torch.Tensor | slice) -> FilterParams:
        """Return the parameters of rows ``row_index`` [m] int64, repeats allowed. The host bounds stay as they are."""
        return FilterParams(
            self.temperatures[row_index],
            self.top_ks[row_index],
            self.top_ps[row_index],
            self.min_ps[row_index],
            self.max_kept,
            self.any_min_p,
        )


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of a batch of ``bs`` requests.

    Every request follows exactly one rule; the three index tensors partition the batch, and their lengths are host
    knowledge. A greedy request carries neutral parameters (temperature 1, no filter).

    Attributes:
        filter_params: temperature and filters, one row per request.
        seeds: [bs] int64, meaningful for seeded requests only.
        greedy_index: int64, requests that take the argmax.
        sampled_index: int64, requests drawn with the engine's noise.
        seeded_index: int64, requests drawn with the noise of their own seed.
    """

    filter_params: FilterParams
    seeds: torch.Tensor
    greedy_index: torch.Tensor
    sampled_index: torch.Tensor
    seeded_index: torch.Tensor

    @classmethod
    def from_lists(
        cls,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        seeds: Sequence[int | None],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """Build the rows from host values, in SGLang's conventions, with two asynchronous copies to the device.

        A request is greedy when its temperature is below ``GREEDY_TEMPERATURE`` or its top-k is 1, otherwise seeded
        when ``seeds`` has a value for it, otherwise sampled. A top-k of -1 means none.

        Raises:
            ValueError: a value outside its range, or lists of different lengths.
        """
        bs = len(temperatures)
        for name, column in (("top_ks", top_ks), ("top_ps", top_ps), ("min_ps", min_ps), ("seeds", seeds)):
            if len(column) != bs:
                raise ValueError(f"{name} has {len(column)} values for {bs} temperatures; pass one value per request")
        requests = [_Request(*values) for values in zip(temperatures, top_ks, top_ps, min_ps, seeds, strict=True)]
        groups = [[i for i, request in enumerate(requests) if request.rule == rule] for rule in _RULES]
        order = [i for group in groups for i in group]

        floats = _columns([[r.temperature, r.top_p, r.min_p] for r in requests], torch.float32, device)
        ints = _columns([[r.top_k, r.seed, i] for r, i in zip(requests, order, strict=True)], torch.int64, device)
        params = FilterParams(
            temperatures=floats[0],
            top_ks=ints[0],
            top_ps=floats[1],
            min_ps=floats[2],
            max_kept=max((r.top_k for r in requests if r.top_k < NO_TOP_K or r.top_p < 1), default=0),
            any_min_p=any(r.min_p > 0 for r in requests),
        )
        greedy, sampled, seeded = torch.split(ints[2], [len(group) for group in groups])
        return cls(params, ints[1], greedy, sampled, seeded)

    @classmethod
    def by_temperature(cls, bs: int, temperatures: torch.Tensor | None, device: torch.device | str) -> SamplingBatch:
        """Return parameters whose rule the device knows and the host does not, as a CUDA graph needs them.

        Args:
            temperatures: [bs] float32, 0 for a greedy request; None when all are greedy.
        """
        everything, nothing = torch.arange(bs, device=device), torch.empty(0, dtype=torch.int64, device=device)
        neutral = torch.ones(bs, device=device)
        params = FilterParams(
            temperatures=neutral if temperatures is None else temperatures,
            top_ks=torch.full((bs,), NO_TOP_K, device=device),
            top_ps=neutral,
            min_ps=torch.zeros(bs, device=device),
            max_kept=0,
            any_min_p=False,
        )
        greedy, sampled = (everything, nothing) if temperatures is None else (nothing, everything)
        return cls(params, torch.zeros_like(everything), greedy, sampled, nothing)

    def __len__(self) -> int:
        return self.seeds.shape[0]

    @property
    def any_greedy(self) -> bool:
        return self.greedy_index.shape[0] > 0

    @cached_property
    def all_greedy(self) -> bool:
        return self.greedy_index.shape[0] == len(self)

    @cached_property
    def any_sampled(self) -> bool:
        """Return whether any request draws with the engine's noise: its verification needs draft probabilities."""
        return self.sampled_index.shape[0] > 0

    @cached_property
    def any_seeded(self) -> bool:
        return self.seeded_index.shape[0] > 0

    def select(self, per_request: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows ``index`` (one of the index tensors) of a [bs, ...] tensor; no copy of the whole batch."""
        return per_request if index.shape[0] == len(self) else per_request.index_select(0, index)

    @property
    def any_filter(self) -> bool:
        """Return whether any request has a top-k, a top-p or a min-p."""
        return self.filter_params.max_kept > 0 or self.filter_params.any_min_p

    @cached_property
    def draw_temperatures(self) -> torch.Tensor:
        """Return [bs] float32: the temperature of every request, 0 for greedy ones."""
        temperatures = self.filter_params.temperatures
        return temperatures.index_fill(0, self.greedy_index, 0.0) if self.any_greedy else temperatures

    @cached_property
    def is_seeded(self) -> torch.Tensor:
        """Return [bs] bool: whether a request draws with its own seed."""
        return torch.zeros_like(self.seeds, dtype=torch.bool).index_fill_(0, self.seeded_index, True)

    @cached_property
    def sampled_params(self) -> FilterParams:
        return self._params_of(self.sampled_index)

    @cached_property
    def seeded_params(self) -> FilterParams:
        return self._params_of(self.seeded_index)

    def _params_of(self, index: torch.Tensor) -> FilterParams:
        return self.filter_params if index.shape[0] == len(self) else self.filter_params.expand(index)


_RULES = ("greedy", "sampled", "seeded")


class _Request:
    """One request's parameters, checked and normalised."""

    def __init__(self, temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature={temperature}; pass a finite value >= 0")
        if top_k != -1 and top_k < 1:
            raise ValueError(f"top_k={top_k}; pass -1 for none, or at least 1")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}; pass a value in (0, 1]")
        if not 0 <= min_p <= 1:
            raise ValueError(f"min_p={min_p}; pass a value in [0, 1]")
        greedy = top_k == 1 or temperature < GREEDY_TEMPERATURE
        self.rule = "greedy" if greedy else "sampled" if seed is None else "seeded"
        # A greedy request gets neutral parameters, so that it never switches a filter on for the whole batch.
        temperature = min(temperature, HIGHEST_TEMPERATURE)
        self.temperature, self.top_p, self.min_p = (1.0, 1.0, 0.0) if greedy else (temperature, top_p, min_p)
        self.top_k = NO_TOP_K if greedy or top_k == -1 else min(top_k, NO_TOP_K)
        # Seeds are 64-bit patterns: values from 2**63 on wrap to the negative numbers of int64.
        self.seed = 0 if seed is None else signed64(seed)


def _columns(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Copy rows of three host values to three [n] device tensors at once."""
    return to_device(torch.tensor(rows, dtype=dtype).view(-1, 3).t().contiguous(), device).unbind(0)


# How many of a row's largest probabilities to look at before sorting all of them. At V = 49152 on one core the 512
# largest take 0.19 ms, 8192 take 1.2 ms and the full sort 2.8 ms; top-p keeps some hundred tokens of a typical row and
# thousands of a flat one.
_HEAD_SIZES = (512, 8192)
_MAX_ELEMENTS = 1 << 24  # filtered at a time: some 300 MB while they are


def target_probs(logits: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """Return probabilities of the next token under each row's temperature and filters.

    Args:
        logits: [n, V], any float dtype, not modified; -inf marks forbidden tokens.
        params: of the n rows.

    Returns:
        [n, V] float32, every row sums to 1 up to rounding.
    """
    probs = torch.softmax(logits.float() / params.temperatures[:, None], dim=-1)
    if params.max_kept or params.any_min_p:
        # Sorting takes several times the memory of what is sorted, and that was not reserved.
        num_rows = max(1, _MAX_ELEMENTS // probs.shape[-1])
        for start in range(0, len(probs), num_rows):
            part = slice(start, start + num_rows)
            _filter_(probs[part], params.expand(part))
    return probs


def _filter_(probs: torch.Tensor, params: FilterParams) -> None:
    """Apply top-k, top-p and min-p to ``probs`` [n, V], in place."""
    # Taken before the cut, which never removes the most likely token.
    floor = probs.amax(-1, keepdim=True) * params.min_ps[:, None] if params.any_min_p else None
    if params.max_kept:
        _cut_(probs, params)
    if floor is not None:
        probs.masked_fill_(probs < floor, 0.0)
    # float64, and an exact 1 for unfiltered rows: a row's bits must not depend on how a batch's sums are blocked.
    mass = probs.sum(-1, keepdim=True, dtype=torch.float64).float()
    filtered = _is_cut(params) | (params.min_ps > 0)
    probs.div_(mass.masked_fill_(~filtered[:, None], 1.0))


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Return whether the host may branch on this tensor's values; on an accelerator it would wait for the stream."""
    return tensor.device.type == "cpu"


def _cut_(probs: torch.Tensor, params: FilterParams) -> None:
    """Zero the tokens of ``probs`` [n, V] that top-k and top-p remove, in place."""
    head = _largest_probs(probs, params)
    num_kept = _kept_in_head(head, params).sum(-1, keepdim=True)
    # Padding rows may hold NaN, of which nothing is kept.
    lowest = head.gather(-1, (num_kept - 1).clamp_min(0))
    lowest.masked_fill_(~_is_cut(params)[:, None], 0.0)
    probs.masked_fill_(probs < lowest, 0.0)

    following = head.gather(-1, num_kept.clamp_max(head.shape[-1] - 1))
    tied = (num_kept < head.shape[-1]) & (following == lowest) & (lowest > 0)
    rows = tied.nonzero()[:, 0] if reads_are_free(probs) else torch.arange(probs.shape[0], device=probs.device)
    room = num_kept - (head > lowest).sum(-1, keepdim=True)
    equals = probs[rows] == lowest[rows]
    probs[rows] = probs[rows].masked_fill_(equals & (equals.cumsum(-1) > room[rows]), 0.0)


def _is_cut(params: FilterParams) -> torch.Tensor:
    """[n] bool: rows that have a top-k or a top-p."""
    return (params.top_ks < NO_TOP_K) | (params.top_ps < 1.0)


def _kept_in_head(head: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """[n, width] bool: which of the descending probabilities ``head`` survive top-k and top-p."""
    mass_before = head.cumsum(-1) - head
    rank = torch.arange(head.shape[-1], device=head.device)
    # Rounding lets a cumulative sum pass 1, which must not turn "no top-p" into a filter.
    top_ps = params.top_ps.masked_fill(params.top_ps >= 1.0, torch.inf)
    return (rank < params.top_ks[:, None]) & (mass_before <= top_ps[:, None])


def _largest_probs(probs: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """[n, width] float32, descending; wide enough to hold every row's cut and the first token after it."""
    vocab_size = probs.shape[-1]
    if params.max_kept < _HEAD_SIZES[-1]:
        return probs.topk(min(params.max_kept + 1, vocab_size)).values
    if reads_are_free(probs):
        for size in (size for size in _HEAD_SIZES if size < vocab_size):
            head = probs.topk(size).values
            ends_within = ~_kept_in_head(head, params)[:, -1]
            if bool((ends_within | ~_is_cut(params)).all()):
                return head
    return probs.sort(dim=-1, descending=True).values


# Values of noise that the CPU draws at once, so that the generator's words stay in cache: 16 rows of 49152 took 4.5 ms
# each in one piece and 2.4 ms row by row.
_NOISE_BLOCK = 65536
# Elsewhere: whole rows would take 56 bytes per row and token, memory that was not reserved.
_DEVICE_NOISE_BLOCK = 1 << 22
# Noise for single tokens costs twice the dense kind per token, and gathering them as much again.
_DENSE_SHARE = 4


def seeded_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the draw of a seeded request: argmax(log p + g(seed, position)) with Gumbel noise g.

    It depends on nothing but the seed, the position and p, so it repeats whatever was drafted.

    Args:
        probs: [n, V] float32.
        seeds: [n] int64.
        positions: [n] int64, absolute position of the token to be drawn.

    Returns:
        [n] int64; a token of probability 0 is never returned.
    """
    rows = max(1, (_NOISE_BLOCK if reads_are_free(probs) else _DEVICE_NOISE_BLOCK) // probs.shape[-1])
    blocks = zip(*(torch.split(values, rows) for values in (probs, seeds, positions)), strict=True)
    return torch.cat([_seeded_scores(*block).argmax(-1) for block in blocks])


def _seeded_scores(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores p / E [n, V] float64, with noise only for the possible tokens if the host sees that they are few."""
    if not reads_are_free(probs):
        return probs / exponential(seeds, positions, probs.shape[-1])
    row, token = probs.nonzero(as_tuple=True)
    if row.shape[0] > probs.numel() // _DENSE_SHARE:
        return probs / exponential(seeds, positions, probs.shape[-1])
    scores = torch.zeros_like(probs, dtype=torch.float64)
    scores[row, token] = probs[row, token] / exponential_at(seeds[row], positions[row], token)
    return scores


LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: a start for maxima that may be subtracted


@triton.jit
def part_at(
    thresholds, highest, group, num_programs, plane, partial_ptr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the parts [BLOCK_B] in which the cumulative masses cross the thresholds, and what is left of these there.

    As everywhere below, that is the last part of a positive mass before which there is at most the threshold, so that
    rounding cannot keep all parts from being it.
    """
    parts = tl.full([BLOCK_B], -1, tl.int32)
    passed = tl.zeros([BLOCK_B], tl.float64)  # before the part
    reached = tl.zeros([BLOCK_B], tl.float64)
    for start in range(0, num_programs, BLOCK_P):
        programs = start + tl.arange(0, BLOCK_P)
        there = (programs < num_programs)[:, None]
        offsets = (group * num_programs + programs)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
        top = tl.load(partial_ptr + plane + offsets, mask=there, other=LOWEST, cache_modifier=".cg")
        mass = tl.load(partial_ptr + 2 * plane + offsets, mask=there, other=0.0, cache_modifier=".cg")
        mass = (mass * tl.exp(top - highest[None, :])).to(tl.float64)
        before = reached[None, :] + tl.cumsum(mass, 0) - mass
        met = (mass > 0) & (before <= thresholds[None, :])
        parts = tl.maximum(parts, tl.max(tl.where(met, programs[:, None], -1), 0))
        passed = tl.maximum(passed, tl.max(tl.where(met, before, 0.0), 0))
        reached += tl.sum(mass, 0)
    return parts, thresholds - passed


@triton.jit
def _weights_at(scores, highest, columns, is_sampled, v) -> tl.tensor:
    """Return exp(score - highest) [BLOCK_B, BLOCK_V] float64 at ``columns``."""
    there = is_sampled[:, None] & (columns >= 0) & (columns < v)
    # Past the L1 cache, as other multiprocessors have written them.
    score = tl.load(scores[:, None] + columns, mask=there, other=float("-inf"), cache_modifier=".cg")
    return tl.exp(score - highest[:, None]).to(tl.float64)


@triton.jit
def column_at(
    thresholds, highest, scores, first_tiles, share, is_sampled, v, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr
) -> tl.tensor:
    """Return the columns [BLOCK_B] in which the cumulative weights from ``first_tiles`` on cross the thresholds."""
    lanes = tl.arange(0, BLOCK_V)[None, :]
    tiles = tl.full([BLOCK_B], -1, tl.int32)
    passed = tl.zeros([BLOCK_B], tl.float64)
    reached = tl.zeros([BLOCK_B], tl.float64)
    for step in range(share):
        columns = (first_tiles + step)[:, None] * BLOCK_V + lanes
        mass = tl.sum(_weights_at(scores, highest, columns, is_sampled, v), 1)
        met = (mass > 0) & (reached <= thresholds)
        tiles = tl.where(met, first_tiles + step, tiles)
        passed = tl.where(met, reached, passed)
        reached += mass
    columns = tiles[:, None] * BLOCK_V + lanes
    weights = _weights_at(scores, highest, columns, is_sampled, v)
    met = (weights > 0) & (tl.cumsum(weights, 1) - weights <= (thresholds - passed)[:, None])
    return tl.max(tl.where(met, columns, -1), 1)
