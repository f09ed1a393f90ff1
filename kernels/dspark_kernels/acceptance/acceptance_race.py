"""The tokens that sampled requests draw after the verdict: an exponential race by tiles, and the winner of all."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.acceptance.acceptance_kernels import FROM_DIFFERENCE, NOTHING, target_mass
from dspark_kernels.acceptance.acceptance_reference import MIN_RESIDUAL_MASS
from dspark_kernels.sampling.noise import Purpose
from dspark_kernels.sampling.noise_device import race_noise

_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))
_MIN_RESIDUAL_MASS = tl.constexpr(MIN_RESIDUAL_MASS)


@triton.jit
def _removed_mass(
    target,
    draft_tokens_ptr,  # of the request
    scores_ptr,  # of the slot
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    slot,
    drawn,
    tokens,
    in_vocab,
    subtract,
    HAS_DISTRIBUTION: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
):
    """Return what a rejection takes off p_t at ``tokens``: p_d, or all of a copied token; 0 without a rejection.

    What belongs to a draft is read after a rejection only, where slot < gamma.
    """
    rejected = tl.load(draft_tokens_ptr + slot, mask=subtract, other=-1)
    removed = tl.where(tokens == rejected, target, 0.0)  # a copied token has p_d = 1
    if HAS_DISTRIBUTION:
        columns = tokens
        is_drawn = subtract & (slot < drawn)
        if HAS_COLUMNS:
            columns = tl.load(columns_ptr + tokens, mask=in_vocab & is_drawn, other=-1)
        known = in_vocab & is_drawn & (columns >= 0)
        scores = tl.load(scores_ptr + columns, mask=known, other=float("-inf"))
        log_norm = tl.load(log_norms_ptr + slot, mask=is_drawn, other=0.0)
        if HAS_COPIED:
            is_drawn = is_drawn & (tl.load(copied_ptr + slot, mask=is_drawn, other=0) == 0)
        removed = tl.where(is_drawn, tl.where(known, tl.exp(scores - log_norm), 0.0), removed)
    return removed


@triton.jit(do_not_specialize=["seed", "gamma", "drawn", "drafts_stride"])
def race_kernel(
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
    winner_ptr,
    winner_token_ptr,
    target_winner_ptr,
    target_winner_token_ptr,
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
) -> None:
    """Grid (bs, tiles): the winner of a tile, in the race over p_t and in the one over what is to be drawn from."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = tl.load(source_ptr + request)
    if source != NOTHING:
        subtract = source == FROM_DIFFERENCE
        slot = tl.load(lens_ptr + request)
        row = tl.load(indptr_ptr + request).to(tl.int64) + slot
        tokens = tile * TILE + tl.arange(0, TILE)
        in_vocab = tokens < vocab_size
        logits = tl.load(logits_ptr + row * row_stride + tokens, mask=in_vocab, other=float("-inf")).to(tl.float32)
        temperature = tl.load(temperatures_ptr + request)
        base, log_mass = tl.load(base_ptr + request), tl.load(log_mass_ptr + request)
        target = target_mass(logits, base, temperature, log_mass, tokens, cut_ptr, last_ptr, row, slot >= 0, HAS_FILTER)

        removed = _removed_mass(
            target,
            draft_tokens_ptr + request * drafts_stride,
            scores_ptr + (request * drawn + slot) * scores_stride if HAS_DISTRIBUTION else None,
            log_norms_ptr + request * drawn if HAS_DISTRIBUTION else None,
            columns_ptr,
            copied_ptr + request * drawn if HAS_COPIED else None,
            slot,
            drawn,
            tokens,
            in_vocab,
            subtract,
            HAS_DISTRIBUTION,
            HAS_COLUMNS,
            HAS_COPIED,
        )
        weights = target - removed

        groups = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        purpose = tl.where(subtract, _RESIDUAL, _BONUS)
        noise = race_noise(seed, tl.load(step_ptr), tl.load(request_keys_ptr + request), slot, purpose, groups)
        # Comparisons with NaN are false: whatever is no positive number cannot win.
        speeds = tl.where(weights > 0, weights / noise, -1.0)
        target_speeds = tl.where(target > 0, target / noise, -1.0)
        winner = tl.max(speeds, 0)
        target_winner = tl.max(target_speeds, 0)
        out = request * num_tiles + tile
        tl.store(tile_mass_ptr + out, tl.sum(tl.where(weights > 0, weights, 0.0), 0))
        tl.store(winner_ptr + out, winner)
        tl.store(winner_token_ptr + out, tl.min(tl.where(speeds == winner, tokens, vocab_size), 0))
        tl.store(target_winner_ptr + out, target_winner)
        tl.store(target_winner_token_ptr + out, tl.min(tl.where(target_speeds == target_winner, tokens, vocab_size), 0))


@triton.jit(do_not_specialize=["gamma"])
def finish_kernel(
    lens_ptr,
    source_ptr,
    tile_mass_ptr,
    winner_ptr,
    winner_token_ptr,
    target_winner_ptr,
    target_winner_token_ptr,
    bonus_ptr,
    out_tokens_ptr,
    num_tiles,
    gamma,
    vocab_size,
    BLOCK_T: tl.constexpr,  # >= num_tiles
) -> None:
    """Grid (bs,): the winner over all tiles."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(source_ptr + request) != NOTHING:
        tiles = tl.arange(0, BLOCK_T)
        used = tiles < num_tiles
        at = request * num_tiles + tiles
        mass = tl.sum(tl.load(tile_mass_ptr + at, mask=used, other=0.0), 0)
        from_weights = mass > _MIN_RESIDUAL_MASS
        speeds = tl.load(winner_ptr + at, mask=used, other=-1.0)
        tokens = tl.load(winner_token_ptr + at, mask=used, other=0)
        target_speeds = tl.load(target_winner_ptr + at, mask=used, other=-1.0)
        target_tokens = tl.load(target_winner_token_ptr + at, mask=used, other=0)
        speeds = tl.where(from_weights, speeds, target_speeds)
        tokens = tl.where(from_weights, tokens, target_tokens)
        fastest = tl.max(speeds, 0)
        token = tl.min(tl.where(speeds == fastest, tokens, vocab_size), 0)
        # Without a winner the row is not a distribution (NaN); the argmax that is there already is a token at least.
        if fastest > 0:
            tl.store(bonus_ptr + request, token)
            tl.store(out_tokens_ptr + request * (gamma + 1) + tl.load(lens_ptr + request), token)
