"""The kernels behind ``accept_fused`` that every batch runs, in their order; filters and seeds have files of their own.

Letters: bs slots of the batch, N verify rows, V tokens, gamma drafts per request. The vocabulary is cut into tiles;
what a tile contributes lies at [row, tile] or [request, tile].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .accept import MIN_RESIDUAL_MASS
from .accept_filter_kernel import is_kept
from .device_noise import race_noise, uniforms
from .noise import Purpose

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))
_MIN_RESIDUAL_MASS = tl.constexpr(MIN_RESIDUAL_MASS)

# What the next token of a request is drawn from.
_NOTHING = tl.constexpr(0)  # greedy, seeded, or a slot of the batch without a request
_TARGET = tl.constexpr(1)
_DIFFERENCE = tl.constexpr(2)  # (p_t - p_d)+


# Sizes that change from step to step must not cause compilations.
@triton.jit(do_not_specialize=["bs"])
def row_stats_kernel(
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    tile_max_ptr,
    tile_token_ptr,
    tile_sum_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    bs,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """Grid (N, tiles): the largest logit of a tile, its token, and the sum of exponentials at the row's temperature."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if row < tl.load(indptr_ptr + bs):
        tokens = tile * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(
            tl.float32
        )
        # As in torch.argmax, NaN is the largest; it also keeps the token inside the vocabulary.
        logits = tl.where(logits == logits, logits, float("inf"))
        largest = tl.max(logits, 0)
        token = tl.min(tl.where(logits == largest, tokens, vocab_size), 0)
        out = row * num_tiles + tile
        tl.store(tile_max_ptr + out, largest)
        tl.store(tile_token_ptr + out, token)
        if SAMPLED:
            ended = tl.zeros([BLOCK_B], tl.int32)
            for start in range(0, bs, BLOCK_B):
                requests = start + tl.arange(0, BLOCK_B)
                ends = tl.load(indptr_ptr + 1 + requests, mask=requests < bs, other=0)
                ended += ((requests < bs) & (ends <= row)).to(tl.int32)
            temperature = tl.load(temperatures_ptr + tl.sum(ended, 0))
            temperature = tl.where(temperature > 0, temperature, 1.0)
            base = tl.where(largest == float("-inf"), 0.0, largest)
            tl.store(tile_sum_ptr + out, tl.sum(tl.exp((logits - base) / temperature), 0))


@triton.jit(do_not_specialize=["seed", "gamma", "drafts_stride"])
def judge_kernel(
    draft_tokens_ptr,
    verify_lens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    tile_max_ptr,
    tile_token_ptr,
    tile_sum_ptr,
    scores_ptr,
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    request_keys_ptr,
    step_ptr,
    prefix_lens_ptr,
    lens_ptr,
    bonus_ptr,
    out_tokens_ptr,
    new_seq_lens_ptr,
    source_ptr,
    log_norm_ptr,
    cut_ptr,
    last_ptr,
    row_log_norm_ptr,
    is_seeded_ptr,
    seeded_speed_ptr,
    seeded_token_ptr,
    seed,
    row_stride,
    scores_stride_b,
    scores_stride_g,
    vocab_size,
    num_tiles,
    drafts_stride,
    gamma,
    SAMPLED: tl.constexpr,
    HAS_FILTER: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_LAW: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    BLOCK_S: tl.constexpr,  # > gamma
    BLOCK_T: tl.constexpr,  # >= num_tiles
) -> None:
    """Grid (bs,): how many drafts are kept; the next token where it is the argmax, otherwise what it is drawn from."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(indptr_ptr + request).to(tl.int64)
    num_rows = tl.load(indptr_ptr + request + 1).to(tl.int64) - first
    verify_len = tl.load(verify_lens_ptr + request).to(tl.int64)
    last = tl.minimum(tl.minimum(verify_len, gamma), num_rows - 1)  # the bonus row's slot, -1 without rows

    slots = tl.arange(0, BLOCK_S)
    tiles = tl.arange(0, BLOCK_T)
    rows = first + slots
    used = (slots <= last)[:, None] & (tiles < num_tiles)[None, :]
    tile_offsets = rows[:, None] * num_tiles + tiles[None, :]
    tile_max = tl.load(tile_max_ptr + tile_offsets, mask=used, other=float("-inf"))
    tile_token = tl.load(tile_token_ptr + tile_offsets, mask=used, other=0)
    largest = tl.max(tile_max, 1)
    choices = tl.min(tl.where(used & (tile_max == largest[:, None]), tile_token, vocab_size - 1), 1)

    if HAS_SEEDS:
        is_seeded = tl.load(is_seeded_ptr + request) != 0
        speeds = tl.load(seeded_speed_ptr + tile_offsets, mask=used & is_seeded, other=-1.0)
        fastest = tl.max(speeds, 1)
        speed_token = tl.load(seeded_token_ptr + tile_offsets, mask=used & is_seeded, other=0)
        drawn_tokens = tl.min(tl.where(used & (speeds == fastest[:, None]), speed_token, vocab_size - 1), 1)
        # Without a winner the row is not a law (NaN); its argmax is a token at least.
        choices = tl.where(fastest > 0, drawn_tokens, choices)

    judged = slots < last
    drafts = tl.load(draft_tokens_ptr + request * drafts_stride + slots, mask=judged, other=-1)
    kept = drafts == choices
    if SAMPLED:
        temperature = tl.load(temperatures_ptr + request)
        is_sampled = temperature > 0
        if HAS_SEEDS:
            is_sampled = is_sampled & (is_seeded == 0)
        temperature = tl.where(is_sampled, temperature, 1.0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        tile_sum = tl.load(tile_sum_ptr + tile_offsets, mask=used, other=0.0)
        total = tl.sum(tile_sum * tl.exp((tile_max - base[:, None]) / temperature), 1)
        log_norms = base / temperature + tl.log(tl.where(total > 0, total, 1.0))
        if HAS_FILTER:
            filtered = slots <= tl.where(is_sampled, last, -1)
            log_norms = tl.load(row_log_norm_ptr + rows, mask=filtered, other=0.0)

        tokens = tl.minimum(tl.maximum(drafts, 0), vocab_size - 1)
        logits = tl.load(logits_ptr + rows * row_stride + tokens, mask=judged, other=0.0).to(tl.float32)
        target_mass = tl.exp(logits / temperature - log_norms)
        if HAS_FILTER:
            cut = tl.load(cut_ptr + rows, mask=filtered, other=0.0)
            last_tied = tl.load(last_ptr + rows, mask=filtered, other=0)
            target_mass = tl.where(is_kept(logits, tokens, cut, last_tied), target_mass, 0.0)
        draft_mass = tl.full([BLOCK_S], 1.0, tl.float32)
        if HAS_LAW:
            columns = tokens
            if HAS_COLUMNS:
                columns = tl.load(columns_ptr + tokens, mask=judged, other=-1).to(tl.int64)
            known = judged & (columns >= 0)
            offsets = request * scores_stride_b + slots * scores_stride_g + columns
            scores = tl.load(scores_ptr + offsets, mask=known, other=float("-inf"))
            draft_log_norms = tl.load(log_norms_ptr + request * gamma + slots, mask=judged, other=0.0)
            draft_mass = tl.where(known, tl.exp(scores - draft_log_norms), 0.0)
            if HAS_COPIED:
                copied = tl.load(copied_ptr + request * gamma + slots, mask=judged, other=0)
                draft_mass = tl.where(copied != 0, 1.0, draft_mass)
        step = tl.load(step_ptr)
        key = tl.load(request_keys_ptr + request)
        drawn = uniforms(seed, step, key, slots, _ACCEPT)
        # u < p_t / p_d, multiplied out; u < 1 makes the minimum with 1 implicit.
        within = drawn * draft_mass.to(tl.float64) < target_mass.to(tl.float64)
        kept = tl.where(is_sampled, within, kept)

    length = tl.min(tl.where(judged & kept, BLOCK_S, slots), 0)
    bonus = tl.sum(tl.where(slots == length, choices, 0), 0)
    bonus = tl.where(num_rows > 0, bonus, 0)
    tl.store(lens_ptr + request, length)
    tl.store(bonus_ptr + request, bonus)
    emitted = tl.where(slots < length, drafts, tl.where(slots == length, bonus, -1))
    tl.store(out_tokens_ptr + request * (gamma + 1) + slots, emitted, mask=slots <= gamma)
    if HAS_PREFIX:
        tl.store(new_seq_lens_ptr + request, tl.load(prefix_lens_ptr + request) + length + 1)
    if SAMPLED:
        source = tl.where(length < last, _DIFFERENCE, _TARGET)
        tl.store(source_ptr + request, tl.where(is_sampled & (num_rows > 0), source, _NOTHING))
        tl.store(log_norm_ptr + request, tl.sum(tl.where(slots == length, log_norms, 0.0), 0))


@triton.jit(do_not_specialize=["seed", "gamma", "drafts_stride"])
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
    log_norm_ptr,
    cut_ptr,
    last_ptr,
    tile_mass_ptr,
    winner_ptr,
    winner_token_ptr,
    target_winner_ptr,
    target_winner_token_ptr,
    seed,
    row_stride,
    scores_stride_b,
    scores_stride_g,
    vocab_size,
    num_tiles,
    drafts_stride,
    gamma,
    HAS_FILTER: tl.constexpr,
    HAS_LAW: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (bs, tiles): who wins a tile, in the race over p_t and in the one over what is to be drawn from."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = tl.load(source_ptr + request)
    if source != _NOTHING:
        subtract = source == _DIFFERENCE
        slot = tl.load(lens_ptr + request)
        row = tl.load(indptr_ptr + request).to(tl.int64) + slot
        tokens = tile * TILE + tl.arange(0, TILE)
        in_vocab = tokens < vocab_size
        logits = tl.load(logits_ptr + row * row_stride + tokens, mask=in_vocab, other=float("-inf")).to(tl.float32)
        target = tl.exp(logits / tl.load(temperatures_ptr + request) - tl.load(log_norm_ptr + request))
        if HAS_FILTER:
            cut = tl.load(cut_ptr + row)
            target = tl.where(is_kept(logits, tokens, cut, tl.load(last_ptr + row)), target, 0.0)

        # What belongs to a draft is read after a rejection only, where slot < gamma.
        draft_at = request * gamma + slot
        rejected = tl.load(draft_tokens_ptr + request * drafts_stride + slot, mask=subtract, other=-1)
        removed = tl.where(tokens == rejected, target, 0.0)  # a copied token has p_d = 1
        if HAS_LAW:
            columns = tokens
            if HAS_COLUMNS:
                columns = tl.load(columns_ptr + tokens, mask=in_vocab & subtract, other=-1)
            known = in_vocab & subtract & (columns >= 0)
            offsets = request * scores_stride_b + slot * scores_stride_g + columns
            scores = tl.load(scores_ptr + offsets, mask=known, other=float("-inf"))
            draft_log_norm = tl.load(log_norms_ptr + draft_at, mask=subtract, other=0.0)
            draft = tl.where(known, tl.exp(scores - draft_log_norm), 0.0)
            if HAS_COPIED:
                copied = tl.load(copied_ptr + draft_at, mask=subtract, other=0)
                removed = tl.where(copied != 0, removed, draft)
            else:
                removed = draft
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
    """Grid (bs,): who wins over all tiles."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(source_ptr + request) != _NOTHING:
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
        # Without a winner the row is not a law (NaN); the argmax that is there already is a token at least.
        if fastest > 0:
            tl.store(bonus_ptr + request, token)
            tl.store(out_tokens_ptr + request * (gamma + 1) + tl.load(lens_ptr + request), token)
