"""Draws the tokens that sampled requests get after the verdict.

Requests that bring their own seed have a draw in every verify row, y = argmax(p / E) with E the noise of (seed,
position), which is compared with the draft there. The kernel races by tiles of the vocabulary; ``judge_kernel``
combines the tiles as it does those of the argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.acceptance.acceptance_filters import is_kept
from dspark_kernels.acceptance.acceptance_kernels import FROM_DIFFERENCE, NOTHING, draft_mass, target_mass
from dspark_kernels.acceptance.acceptance_reference import MIN_RESIDUAL_MASS
from dspark_kernels.noise import Purpose, seeded_noise, uniforms

_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))
_MIN_RESIDUAL_MASS = tl.constexpr(MIN_RESIDUAL_MASS)


@triton.jit
def _weights(
    request,
    tokens,
    draft_tokens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    scores_ptr,
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    lens_ptr,
    base_ptr,
    log_mass_ptr,
    cut_ptr,
    last_ptr,
    row_stride,
    scores_stride,
    vocab_size,
    drafts_stride,
    drawn,
    subtract,
    HAS_FILTER: tl.constexpr,
    HAS_DISTRIBUTION: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What a request's next token is drawn from, at ``tokens``, and p_t there; 0 for whatever is no positive number."""
    slot = tl.load(lens_ptr + request)
    row = tl.load(indptr_ptr + request).to(tl.int64) + slot
    in_vocab = tokens < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=in_vocab, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + request)
    base, log_mass = tl.load(base_ptr + request), tl.load(log_mass_ptr + request)
    target = target_mass(logits, base, temperature, log_mass, tokens, cut_ptr, last_ptr, row, slot >= 0, HAS_FILTER)
    # What a rejection takes off p_t: p_d, or all of a copied token, which has p_d = 1. What belongs to a draft is read
    # after a rejection only, where slot < gamma.
    rejected = tl.load(draft_tokens_ptr + request * drafts_stride + slot, mask=subtract, other=-1)
    removed = tl.where(tokens == rejected, target, 0.0)
    if HAS_DISTRIBUTION:
        proposed, is_drawn = draft_mass(
            tokens,
            request * drawn + slot,
            subtract & (slot < drawn),
            in_vocab,
            scores_ptr,
            scores_stride,
            log_norms_ptr,
            columns_ptr,
            copied_ptr,
            HAS_COLUMNS,
            HAS_COPIED,
        )
        removed = tl.where(is_drawn, proposed, removed)
    # Comparisons with NaN are false.
    return tl.where(target > removed, target - removed, 0.0), tl.where(target > 0, target, 0.0)


@triton.jit(do_not_specialize=["drawn", "drafts_stride"])
def mass_kernel(
    draft_tokens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    scores_ptr,
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    lens_ptr,
    source_ptr,
    base_ptr,
    log_mass_ptr,
    cut_ptr,
    last_ptr,
    tile_mass_ptr,
    target_tile_mass_ptr,
    row_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    drafts_stride,
    drawn,
    HAS_FILTER: tl.constexpr,
    HAS_DISTRIBUTION: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (bs, tiles): the masses of a tile, of what is to be drawn from and of p_t."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = tl.load(source_ptr + request)
    if source != NOTHING:
        weights, target = _weights(
            request,
            tile * TILE + tl.arange(0, TILE),
            draft_tokens_ptr,
            logits_ptr,
            indptr_ptr,
            temperatures_ptr,
            scores_ptr,
            log_norms_ptr,
            columns_ptr,
            copied_ptr,
            lens_ptr,
            base_ptr,
            log_mass_ptr,
            cut_ptr,
            last_ptr,
            row_stride,
            scores_stride,
            vocab_size,
            drafts_stride,
            drawn,
            source == FROM_DIFFERENCE,
            HAS_FILTER,
            HAS_DISTRIBUTION,
            HAS_COLUMNS,
            HAS_COPIED,
        )
        tl.store(tile_mass_ptr + request * num_tiles + tile, tl.sum(weights, 0))
        tl.store(target_tile_mass_ptr + request * num_tiles + tile, tl.sum(target, 0))


@triton.jit
def _last_reached(weights, threshold) -> tuple[tl.tensor, tl.tensor]:
    """Return the last of ``weights`` > 0 before which there is at most ``threshold``, and what there is before it.

    That is the one in which the cumulative sum crosses the threshold, or the last one if rounding lets none cross it;
    -1 if there is none.
    """
    weights = weights.to(tl.float64)
    before = tl.cumsum(weights, 0) - weights
    reached = (weights > 0) & (before <= threshold)
    last = tl.max(tl.where(reached, tl.arange(0, weights.shape[0]), -1), 0)
    return last, tl.max(tl.where(reached, before, 0.0), 0)


@triton.jit(do_not_specialize=["seed", "gamma", "drawn", "drafts_stride"])
def token_kernel(
    draft_tokens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    scores_ptr,
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    request_keys_ptr,
    step_ptr,
    lens_ptr,
    source_ptr,
    base_ptr,
    log_mass_ptr,
    cut_ptr,
    last_ptr,
    tile_mass_ptr,
    target_tile_mass_ptr,
    bonus_ptr,
    out_tokens_ptr,
    seed: tl.int64,
    row_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    drafts_stride,
    gamma,
    drawn,
    HAS_FILTER: tl.constexpr,
    HAS_DISTRIBUTION: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # >= num_tiles
) -> None:
    """Grid (bs,): the token at which the cumulative weight crosses u times all of it: its tile, then itself."""
    request = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + request)
    if source != NOTHING:
        subtract = source == FROM_DIFFERENCE
        slot = tl.load(lens_ptr + request)
        tiles = tl.arange(0, BLOCK_T)
        at = request * num_tiles + tiles
        masses = tl.load(tile_mass_ptr + at, mask=tiles < num_tiles, other=0.0)
        from_weights = tl.sum(masses, 0) > _MIN_RESIDUAL_MASS
        masses = tl.where(from_weights, masses, tl.load(target_tile_mass_ptr + at, mask=tiles < num_tiles, other=0.0))
        key, purpose = tl.load(request_keys_ptr + request), tl.where(subtract, _RESIDUAL, _BONUS)
        threshold = uniforms(seed, tl.load(step_ptr), key, slot, purpose) * tl.sum(masses.to(tl.float64), 0)
        tile, before = _last_reached(masses, threshold)
        # A row of no mass is no distribution (NaN); the argmax that is there already is a token at least.
        if tile >= 0:
            weights, target = _weights(
                request,
                tile * TILE + tl.arange(0, TILE),
                draft_tokens_ptr,
                logits_ptr,
                indptr_ptr,
                temperatures_ptr,
                scores_ptr,
                log_norms_ptr,
                columns_ptr,
                copied_ptr,
                lens_ptr,
                base_ptr,
                log_mass_ptr,
                cut_ptr,
                last_ptr,
                row_stride,
                scores_stride,
                vocab_size,
                drafts_stride,
                drawn,
                subtract,
                HAS_FILTER,
                HAS_DISTRIBUTION,
                HAS_COLUMNS,
                HAS_COPIED,
            )
            place, _before = _last_reached(tl.where(from_weights, weights, target), threshold - before)
            token = tile * TILE + place
            tl.store(bonus_ptr + request, token)
            tl.store(out_tokens_ptr + request * (gamma + 1) + slot, token)


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

    Speeds are float32 with a relative error of some 1e-6: the winner is the reference's, except in closer ties. They
    depend only on the row and its noise. A tile without a kept token, or whose row is no distribution,
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
