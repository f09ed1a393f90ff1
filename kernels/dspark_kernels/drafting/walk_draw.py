"""Draws a slot's sampled tokens in the walk's launch: the part, the tile and the column where a number is crossed."""

from __future__ import annotations

import triton
import triton.language as tl

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
