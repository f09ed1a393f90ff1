"""The launch that chooses one slot's tokens: Markov bias, base logits, choice and normaliser in one pass over V.

Programs have consecutive parts of the vocabulary, tile by tile, for a group of requests each; a tile of W2 is read
once per group. Per request every program leaves its best column and, for sampled requests, the sum of exponentials of
its part; the last program of a group to arrive combines them and writes the tokens, from which the next slot's launch
starts.

A sampled token is where the cumulative sum of exp(score) crosses u times all of it: the last program finds the part,
then the tile, then the column, and reads no scores but those of the part. Sums of parts are float32 with a relative
error of some 1e-6, and so are the probabilities that drafts are drawn with.

A seeded request runs a race, argmax(score - log E) with independent unit-rate exponential E, which is distributed as
softmax(score). The noise is that of its own seed, by which verification will draw the token of that
position: nothing is stored, as that draw is compared and not weighed against a distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.drafting.heads import FIRST, FOLLOWED, LEAST_TEMPERATURE, OUTRIGHT
from dspark_kernels.noise import Purpose, seeded_noise_at, uniforms
from dspark_kernels.sampling import LOWEST, column_at, part_at

DRAFT = tl.constexpr(int(Purpose.DRAFT))
_OUTRIGHT = tl.constexpr(OUTRIGHT)
FOLLOWED_AT = tl.constexpr(FOLLOWED)
_FIRST = tl.constexpr(FIRST)
NO_COLUMN = tl.constexpr(0x7FFFFFFF)
LOWEST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)


@triton.jit
def or_copied(tokens, candidates, candidate_columns, boosts, alive) -> tl.tensor:
    """Return tokens that were drawn, or candidates of live chains that weigh enough and cannot be."""
    copied = alive & (candidates >= 0) & (candidate_columns < 0) & (boosts >= _OUTRIGHT)
    return tl.where(copied, candidates, tokens)


@triton.jit
def _chosen(
    group,
    rows,
    in_batch,
    num_programs,
    plane,
    partial_ptr,
    partial_columns_ptr,
    is_sampled,
    scores_ptr,
    row_starts,
    share,
    v,
    request_keys_ptr,
    step_ptr,
    seed,
    slot,
    log_norms_ptr,
    log_norms_stride,
    SAMPLED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Combine the partial results of a group's programs: return its columns [BLOCK_B], and write its normalisers."""
    best = tl.full([BLOCK_P, BLOCK_B], float("-inf"), tl.float32)
    columns = tl.full([BLOCK_P, BLOCK_B], NO_COLUMN, tl.int32)
    tops = tl.full([BLOCK_P, BLOCK_B], LOWEST, tl.float32)
    masses = tl.zeros([BLOCK_P, BLOCK_B], tl.float32)
    for start in range(0, num_programs, BLOCK_P):
        programs = start + tl.arange(0, BLOCK_P)
        there = (programs < num_programs)[:, None]
        offsets = (group * num_programs + programs)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
        # Past the L1 cache, which other multiprocessors' stores do not reach.
        value = tl.load(partial_ptr + offsets, mask=there, other=float("-inf"), cache_modifier=".cg")
        column = tl.load(partial_columns_ptr + offsets, mask=there, other=NO_COLUMN, cache_modifier=".cg")
        better = (value > best) | ((value == best) & (column < columns))
        best = tl.where(better, value, best)
        columns = tl.where(better, column, columns)
        if SAMPLED:
            top = tl.load(partial_ptr + plane + offsets, mask=there, other=LOWEST, cache_modifier=".cg")
            mass = tl.load(partial_ptr + 2 * plane + offsets, mask=there, other=0.0, cache_modifier=".cg")
            new_tops = tl.maximum(tops, top)
            masses = masses * tl.exp(tops - new_tops) + mass * tl.exp(top - new_tops)
            tops = new_tops
    winner = tl.max(best, 0)
    chosen = tl.min(tl.where(best == winner[None, :], columns, NO_COLUMN), 0)
    if SAMPLED:
        highest = tl.max(tops, 0)
        total = tl.sum(masses * tl.exp(tops - highest[None, :]), 0)
        tl.store(log_norms_ptr + rows.to(tl.int64) * log_norms_stride, highest + tl.log(total), mask=is_sampled)
        request_keys = tl.load(request_keys_ptr + rows, mask=in_batch, other=0)
        numbers = uniforms(seed, tl.load(step_ptr), request_keys, slot + rows * 0, DRAFT)
        part, threshold = part_at(
            numbers * total.to(tl.float64), highest, group, num_programs, plane, partial_ptr, BLOCK_B, BLOCK_P
        )
        scores = scores_ptr + row_starts
        drawn = column_at(threshold, highest, scores, part * share, share, is_sampled, v, BLOCK_B, BLOCK_V)
        chosen = tl.where(is_sampled & (drawn >= 0), drawn, chosen)
    return chosen


@triton.jit
def _bias(
    latents,
    in_batch,
    w2_ptr,
    w2_scales_ptr,
    columns,
    is_column,
    SCALED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Return the product of latents and W2, [BLOCK_B, BLOCK_V] float32.

    ``latents`` are values [BLOCK_B, BLOCK_R], or pointers to the requests' rows [BLOCK_B] if the rank is too wide
    for one tile.
    """
    dims = tl.arange(0, BLOCK_R)
    w2_rows = w2_ptr + columns.to(tl.int64) * RANK
    if RANK <= BLOCK_R:
        w2 = tl.load(w2_rows[:, None] + dims[None, :], mask=is_column[:, None] & (dims < RANK)[None, :], other=0.0)
        bias = tl.dot(latents, tl.trans(w2.to(latents.dtype)), input_precision="ieee")
    else:
        bias = tl.zeros([latents.shape[0], w2_rows.shape[0]], tl.float32)
        for start in range(0, RANK, BLOCK_R):
            in_rank = start + dims < RANK
            part_of_w2 = is_column[:, None] & in_rank[None, :]
            part = tl.load(
                latents[:, None] + (start + dims)[None, :], mask=in_batch[:, None] & in_rank[None, :], other=0.0
            )
            w2 = tl.load(w2_rows[:, None] + (start + dims)[None, :], mask=part_of_w2, other=0.0)
            bias += tl.dot(part, tl.trans(w2.to(part.dtype)), input_precision="ieee")
    if SCALED:
        bias *= tl.load(w2_scales_ptr + columns, mask=is_column, other=0.0)[None, :]
    return bias


@triton.jit
def seeded_race(scores, seeds, positions, token_ids_ptr, columns, competes, REDUCED: tl.constexpr) -> tl.tensor:
    """Return scores raced with the noise of requests' own seeds at the tokens of the columns, which broadcast."""
    tokens = columns
    if REDUCED:
        tokens = tl.load(token_ids_ptr + columns, mask=competes, other=0).to(tl.int32)
    return scores - tl.log(seeded_noise_at(seeds, positions, tokens))


@triton.jit
def candidates_at(
    chains,  # pointers, [BLOCK_B] or one
    weights_ptr,
    weights_stride,
    columns_ptr,
    slot,
    in_batch,
    alive,
    REDUCED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load candidates for a slot, their columns (-1 for none), and their boosts where their chains are alive."""
    matched = tl.load(chains, mask=in_batch, other=0)
    tokens = tl.load(chains + _FIRST + slot, mask=in_batch, other=-1)
    boosts = tl.load(weights_ptr + matched * weights_stride + slot, mask=alive, other=0.0)
    columns = tokens.to(tl.int32)
    if REDUCED:
        columns = tl.load(columns_ptr + tokens, mask=in_batch & (tokens >= 0), other=-1)
    return tokens, columns, boosts


@triton.jit
def _leave(best, best_columns, tops, masses, partial_ptr, partial_columns_ptr, own, plane, SAMPLED: tl.constexpr):
    """Write what a program has found, for the one that finishes."""
    value = tl.max(best, 1)
    tl.store(partial_ptr + own, value)
    tl.store(partial_columns_ptr + own, tl.min(tl.where(best == value[:, None], best_columns, NO_COLUMN), 1))
    if SAMPLED:
        top = tl.max(tops, 1)
        tl.store(partial_ptr + plane + own, top)
        tl.store(partial_ptr + 2 * plane + own, tl.sum(masses * tl.exp(tops - top[:, None]), 1))


_SMALL_POINTERS = [
    *("prev_ptr", "temperatures_ptr", "request_keys_ptr", "step_ptr", "seeds_ptr", "positions_ptr", "is_seeded_ptr"),
    *("log_norms_ptr", "tokens_ptr", "chains_ptr", "weights_ptr"),
]
_SMALL_STRIDES = ["log_norms_stride", "tokens_stride", "chains_stride", "weights_stride"]


# No slot, depth, seed or batch size may cause a compilation of its own, through its value or where its pointers lie.
@triton.jit(
    do_not_specialize=["bs", "depth", "prev_stride", "seed", "slot", *_SMALL_STRIDES],
    do_not_specialize_on_alignment=[*_SMALL_POINTERS, "counters_ptr"],
)
def choose_kernel(  # noqa: C901 - most branches are those of its forms
    base_ptr,  # [bs, v] rows of this slot, depth * v apart
    prev_ptr,  # [bs] int64, the tokens before this slot
    prev_stride,
    latents_ptr,  # W1 [V, r] when BY_TOKEN, else [bs, r]
    w2_ptr,  # [v, r], or codes of it
    w2_scales_ptr,  # [v] float32, read when SCALED
    token_ids_ptr,  # [v] int64, read when REDUCED
    temperatures_ptr,  # [bs] float32, 0 = greedy; read when SAMPLED or SEEDED
    request_keys_ptr,  # [bs] int64; this and the next two are read when SAMPLED
    step_ptr,  # [] int64
    seed: tl.int64,
    seeds_ptr,  # [bs] int64; this and the next two are read when SEEDED
    positions_ptr,  # [bs] int64, of slot 0
    is_seeded_ptr,  # [bs] uint8
    scores_ptr,  # [bs, v] float32, as far apart; written, as log_norms, for sampled requests when SAMPLED
    log_norms_ptr,  # [bs] float32
    log_norms_stride,
    tokens_ptr,  # [bs] int64
    tokens_stride,
    chains_ptr,  # [bs, chains_stride] int64; this and the next are read when CHAINED
    chains_stride,
    weights_ptr,  # [M + 1, weights_stride] float32, boosts
    weights_stride,
    columns_ptr,  # [V] int32, read when CHAINED and REDUCED
    partial_ptr,  # [3, groups, programs, BLOCK_B] float32: best value, highest score, mass relative to it
    partial_columns_ptr,  # [groups, programs, BLOCK_B] int32
    counters_ptr,  # [groups] int32, zero before the launch
    slot,
    depth,
    bs,
    v,
    RANK: tl.constexpr,  # 0: no Markov head
    BY_TOKEN: tl.constexpr,
    SCALED: tl.constexpr,
    REDUCED: tl.constexpr,
    SAMPLED: tl.constexpr,
    SEEDED: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Grid (groups of BLOCK_B requests, programs that share the vocabulary); see the module."""
    group = tl.program_id(0)
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    rows = group * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = rows < bs
    wide_rows = rows.to(tl.int64)
    # Multiplied here, and not handed in: of v the compiler knows what it is divisible by, whatever the depth.
    row_starts = wide_rows * depth * v
    lanes = tl.arange(0, BLOCK_V)
    dims = tl.arange(0, BLOCK_R)

    if RANK > 0:
        source = tl.load(prev_ptr + wide_rows * prev_stride, mask=in_batch, other=0) if BY_TOKEN else wide_rows
        latents = latents_ptr + source * RANK
        if RANK <= BLOCK_R:
            latents = tl.load(
                latents[:, None] + dims[None, :], mask=in_batch[:, None] & (dims < RANK)[None, :], other=0.0
            )
    is_sampled = in_batch
    sharpness = tl.full([BLOCK_B], 1.0, tl.float32)
    if SAMPLED or SEEDED:
        temperatures = tl.load(temperatures_ptr + rows, mask=in_batch, other=0.0)
        is_sampled = temperatures > 0
        sharpness = 1.0 / tl.where(is_sampled, tl.maximum(temperatures, LOWEST_TEMPERATURE), 1.0)
    if SEEDED:
        is_seeded = in_batch & (tl.load(is_seeded_ptr + rows, mask=in_batch, other=0) != 0)
        is_sampled = is_sampled & ~is_seeded
        seeds = tl.load(seeds_ptr + rows, mask=in_batch, other=0)
        positions = tl.load(positions_ptr + rows, mask=in_batch, other=0) + slot

    if CHAINED:
        chains = chains_ptr + wide_rows * chains_stride
        alive = in_batch & (tl.load(chains + FOLLOWED_AT, mask=in_batch, other=-1) == slot)
        candidates, candidate_columns, boosts = candidates_at(
            chains, weights_ptr, weights_stride, columns_ptr, slot, in_batch, alive, REDUCED
        )

    num_tiles = tl.cdiv(v, BLOCK_V)
    share = tl.cdiv(num_tiles, num_programs)
    # Per lane, so that nothing is reduced inside the loop. A lane sees ascending columns: the first of equals stays.
    best = tl.full([BLOCK_B, BLOCK_V], float("-inf"), tl.float32)
    best_columns = tl.zeros([BLOCK_B, BLOCK_V], tl.int32) + (program * share * BLOCK_V + lanes)[None, :]
    tops = tl.full([BLOCK_B, BLOCK_V], LOWEST, tl.float32)
    masses = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for tile in range(program * share, tl.minimum((program + 1) * share, num_tiles)):
        columns = tile * BLOCK_V + lanes
        is_column = columns < v
        logits = tl.load(
            base_ptr + row_starts[:, None] + columns[None, :],
            mask=in_batch[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)
        if RANK > 0:
            logits += _bias(latents, in_batch, w2_ptr, w2_scales_ptr, columns, is_column, SCALED, RANK, BLOCK_R)
        # A NaN never wins, so that the choice is a column even if all of them are.
        logits = tl.where((logits == logits) & is_column[None, :], logits, float("-inf"))
        scores = logits * sharpness[:, None]
        if CHAINED:
            scores += tl.where(columns[None, :] == candidate_columns[:, None], boosts[:, None], 0.0)
        values = scores
        if SAMPLED:
            tl.store(
                scores_ptr + row_starts[:, None] + columns[None, :],
                scores,
                mask=is_sampled[:, None] & is_column[None, :],
            )
            # One of the two exponents of the online sum is always 0.
            rises = scores > tops
            ratio = tl.exp(-tl.abs(scores - tops))
            masses = tl.where(rises, masses * ratio + 1.0, masses + ratio)
            tops = tl.where(rises, scores, tops)
        if SEEDED:
            raced = seeded_race(
                scores, seeds[:, None], positions[:, None], token_ids_ptr, columns[None, :], is_column[None, :], REDUCED
            )
            values = tl.where(is_seeded[:, None], raced, values)
        better = values > best
        best = tl.where(better, values, best)
        best_columns = tl.where(better, columns[None, :], best_columns)

    plane = tl.num_programs(0) * num_programs * BLOCK_B
    own = (group * num_programs + program) * BLOCK_B + tl.arange(0, BLOCK_B)
    _leave(best, best_columns, tops, masses, partial_ptr, partial_columns_ptr, own, plane, SAMPLED)

    # All threads' stores come before the one thread's release; the thread that counts last acquires them all.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel", scope="gpu")
    if arrived == num_programs - 1:
        chosen = _chosen(
            group,
            rows,
            in_batch,
            num_programs,
            plane,
            partial_ptr,
            partial_columns_ptr,
            is_sampled,
            scores_ptr,
            row_starts,
            share,
            v,
            request_keys_ptr,
            step_ptr,
            seed,
            slot,
            log_norms_ptr,
            log_norms_stride,
            SAMPLED,
            BLOCK_B,
            BLOCK_V,
            BLOCK_P,
        )
        tokens = chosen.to(tl.int64)
        if REDUCED:
            tokens = tl.load(token_ids_ptr + tokens, mask=in_batch, other=0)
        if CHAINED:
            tokens = or_copied(tokens, candidates, candidate_columns, boosts, alive)
            tl.store(chains + FOLLOWED_AT, slot + 1, mask=alive & (tokens == candidates))
        tl.store(tokens_ptr + wide_rows * tokens_stride, tokens, mask=in_batch)
