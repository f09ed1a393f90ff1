"""The draws of requests that bring their own seed: y = argmax(p / E), E the noise of (seed, position).

Every verify row of such a request has its y, which is compared with the draft there. The kernel races by tiles of the
vocabulary; ``judge_kernel`` combines the tiles as it does those of the argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.acceptance.acceptance_filters import is_kept
from dspark_kernels.sampling.noise_device import seeded_noise


# Columns of one tensor, whose alignment changes with the size of the batch.
@triton.jit(
    do_not_specialize=["gamma"],
    do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr", "is_seeded_ptr", "positions_ptr"],
)
def seeded_kernel(
    verify_lens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    seeds_ptr,
    is_seeded_ptr,
    positions_ptr,
    tile_max_ptr,
    seeded_speed_ptr,
    seeded_token_ptr,
    cut_ptr,
    last_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    gamma,
    HAS_FILTER: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # >= num_tiles
) -> None:
    """Grid (bs, gamma + 1, tiles): the fastest kept token of a tile, and its speed exp((logit - max) / T) / E.

    Speeds are float32 with a relative error of some 1e-6: the winner is the reference's but for ties that near. They
    depend on the row and its noise alone. A tile without a kept token, or whose row is no distribution,
    has the speed -1.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    tile = tl.program_id(2)
    first = tl.load(indptr_ptr + request).to(tl.int64)
    num_rows = tl.load(indptr_ptr + request + 1).to(tl.int64) - first
    verify_len = tl.load(verify_lens_ptr + request).to(tl.int64)
    is_used = (slot <= tl.minimum(verify_len, gamma)) & (slot < num_rows)
    if is_used & (tl.load(is_seeded_ptr + request) != 0):
        row = first + slot
        out = row * num_tiles + tile
        speed = tl.full([], -1.0, tl.float32)
        token = tile * TILE
        cut = tl.full([], float("-inf"), tl.float32)
        last = vocab_size
        if HAS_FILTER:
            cut = tl.load(cut_ptr + row)
            last = tl.load(last_ptr + row)
        if tl.load(tile_max_ptr + out) >= cut:
            tiles = tl.arange(0, BLOCK_T)
            used = tiles < num_tiles
            row_max = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=used, other=float("-inf"))
            largest = tl.max(row_max, 0)
            tokens = tile * TILE + tl.arange(0, TILE)
            in_vocab = tokens < vocab_size
            logits = tl.load(logits_ptr + row * row_stride + tokens, mask=in_vocab, other=float("-inf")).to(tl.float32)
            weights = tl.exp((logits - largest) / tl.load(temperatures_ptr + request))
            if HAS_FILTER:
                weights = tl.where(is_kept(logits, tokens, cut, last), weights, 0.0)
            pairs = tile * (TILE // 2) + tl.arange(0, TILE // 2)
            position = tl.load(positions_ptr + request) + slot
            noise = seeded_noise(tl.load(seeds_ptr + request), position, pairs)
            # Comparisons with NaN are false: whatever is no positive number cannot win.
            speeds = tl.where(weights > 0, weights / noise, -1.0)
            speed = tl.max(speeds, 0)
            token = tl.min(tl.where(speeds == speed, tokens, vocab_size), 0)
        tl.store(seeded_speed_ptr + out, speed)
        tl.store(seeded_token_ptr + out, token)
