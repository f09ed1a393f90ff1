"""The kernels behind ``accept`` that every batch runs: statistics of rows, and the verdict.

Letters: bs slots of the batch, N verify rows, V tokens, gamma drafts per request. The vocabulary is cut into tiles;
what a tile contributes lies at [row, tile] or [request, tile].

The distribution of a row is exp((logit - base) / T - log_mass), with base its largest logit and log_mass the logarithm
of the sum. Differences of logits come first: at a temperature of 1e-5 a float32 holds no logit / T to within 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.acceptance.acceptance_filters import is_kept
from dspark_kernels.noise import Purpose, uniforms

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))

# What the next token of a request is drawn from.
NOTHING = tl.constexpr(0)  # greedy, seeded, or a slot of the batch without a request
FROM_TARGET = tl.constexpr(1)
FROM_DIFFERENCE = tl.constexpr(2)  # (p_t - p_d)+


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


@triton.jit
def target_mass(
    logits, base, temperature, log_mass, tokens, cut_ptr, last_ptr, rows, mask, HAS_FILTER: tl.constexpr
) -> tl.tensor:
    """Return p_t of tokens [n] in rows that have these logits there."""
    mass = tl.exp((logits - base) / temperature - log_mass)
    if HAS_FILTER:
        cut = tl.load(cut_ptr + rows, mask=mask, other=0.0)
        last_tied = tl.load(last_ptr + rows, mask=mask, other=0)
        mass = tl.where(is_kept(logits, tokens, cut, last_tied), mass, 0.0)
    return mass


@triton.jit
def draft_mass(
    tokens,
    places,
    is_drawn,
    there,
    scores_ptr,
    scores_stride,
    log_norms_ptr,
    columns_ptr,
    copied_ptr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return p_d of tokens [n] that are there, in the drawn slots at these places, and which slots were not copied."""
    columns = tokens
    if HAS_COLUMNS:
        columns = tl.load(columns_ptr + tokens, mask=there & is_drawn, other=-1)
    known = there & is_drawn & (columns >= 0)
    scores = tl.load(scores_ptr + places * scores_stride + columns, mask=known, other=float("-inf"))
    log_norms = tl.load(log_norms_ptr + places, mask=is_drawn, other=0.0)
    if HAS_COPIED:
        is_drawn = is_drawn & (tl.load(copied_ptr + places, mask=is_drawn, other=0) == 0)
    return tl.where(known, tl.exp(scores - log_norms), 0.0), is_drawn


@triton.jit
def _seeded_choices(speed_ptr, token_ptr, offsets, mask, choices, vocab_size):
    """Return the tokens that seeds draw; a row without a winner is no distribution (NaN), and keeps its argmax."""
    speeds = tl.load(speed_ptr + offsets, mask=mask, other=-1.0)
    fastest = tl.max(speeds, 1)
    tokens = tl.load(token_ptr + offsets, mask=mask, other=0)
    drawn = tl.min(tl.where(mask & (speeds == fastest[:, None]), tokens, vocab_size - 1), 1)
    return tl.where(fastest > 0, drawn, choices)


@triton.jit(do_not_specialize=["seed", "gamma", "drawn", "drafts_stride"])
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
    base_ptr,
    log_mass_ptr,
    cut_ptr,
    last_ptr,
    row_log_mass_ptr,
    is_seeded_ptr,
    seeded_speed_ptr,
    seeded_token_ptr,
    seed: tl.int64,
    row_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    drafts_stride,
    gamma,
    drawn,
    SAMPLED: tl.constexpr,
    HAS_FILTER: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_DISTRIBUTION: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_COPIED: tl.constexpr,
    BLOCK_S: tl.constexpr,  # > gamma
    BLOCK_T: tl.constexpr,  # >= num_tiles
) -> None:
    """Grid (bs,): how many drafts are kept; the next token if it is the argmax, otherwise what it is drawn from."""
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
        seeded_rows = used & is_seeded
        choices = _seeded_choices(seeded_speed_ptr, seeded_token_ptr, tile_offsets, seeded_rows, choices, vocab_size)

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
        log_masses = tl.log(tl.where(total > 0, total, 1.0))
        filtered = slots <= tl.where(is_sampled, last, -1)
        if HAS_FILTER:
            log_masses = tl.load(row_log_mass_ptr + rows, mask=filtered, other=0.0)

        tokens = tl.minimum(tl.maximum(drafts, 0), vocab_size - 1)
        logits = tl.load(logits_ptr + rows * row_stride + tokens, mask=judged, other=0.0).to(tl.float32)
        kept_mass = target_mass(
            logits, base, temperature, log_masses, tokens, cut_ptr, last_ptr, rows, filtered, HAS_FILTER
        )
        proposed = tl.full(slots.shape, 1.0, tl.float32)  # of copied drafts, as are those from slot `drawn` on
        if HAS_DISTRIBUTION:
            masses, is_drawn = draft_mass(
                tokens,
                request * drawn + slots,
                judged & (slots < drawn),
                judged,
                scores_ptr,
                scores_stride,
                log_norms_ptr,
                columns_ptr,
                copied_ptr,
                HAS_COLUMNS,
                HAS_COPIED,
            )
            proposed = tl.where(is_drawn, masses, proposed)
        number = uniforms(seed, tl.load(step_ptr), tl.load(request_keys_ptr + request), slots, _ACCEPT)
        # u < p_t / p_d, multiplied out; u < 1 makes the minimum with 1 implicit.
        within = number * proposed.to(tl.float64) < kept_mass.to(tl.float64)
        kept = tl.where(is_sampled, within, kept)

    length = tl.min(tl.where(judged & kept, BLOCK_S, slots), 0)
    bonus = tl.sum(tl.where(slots == length, choices, 0), 0)
    bonus = tl.where(num_rows > 0, bonus, 0)
    tl.store(lens_ptr + request, length)
    tl.store(bonus_ptr + request, bonus)
    emitted = tl.where(slots < length, drafts, tl.where(slots == length, bonus, -1))
    tl.store(out_tokens_ptr + request * (gamma + 1) + slots, emitted, mask=slots <= gamma)
    tl.store(new_seq_lens_ptr + request, tl.load(prefix_lens_ptr + request) + length + 1)
    if SAMPLED:
        source = tl.where(length < last, FROM_DIFFERENCE, FROM_TARGET)
        tl.store(source_ptr + request, tl.where(is_sampled & (num_rows > 0), source, NOTHING))
        tl.store(base_ptr + request, tl.sum(tl.where(slots == length, base, 0.0), 0))
        tl.store(log_mass_ptr + request, tl.sum(tl.where(slots == length, log_masses, 0.0), 0))
