"""Top-k, top-p and min-p as a cut through each row of logits.

What ``target_probs`` keeps of a row is a prefix of its tokens in descending order of logit, ties by lowest id.
So a filter is a pair: a token is kept when its logit exceeds ``cut``, or equals it and the id is at most ``last``; and
the distribution needs the logarithm of the sum of exp((logit - base) / T) over the kept tokens, base being the largest
logit. The kernel finds these three without sorting:

1. the maxima and sums of the tiles bound the cut from below: the k-th largest maximum of a tile is at most the k-th
   largest logit, and tokens of relative weight below (1 - p) / V cannot be needed to reach p;
2. what lies above the bound is collected from the tiles that hold such tokens: some dozen tokens of a row, as a rule;
3. the cut is found among them by bisection over integers that are ordered like float32, from one that occurs to
   another;
4. if top-k or top-p ends within a tie, a pass over the tiles that reach the cut finds the last token of it.

When more is collected than there is room for, passes over the row narrow the interval first, in turn at quarters of
values, which suit the bulk of a row, and at quarters of keys, of which 16 passes reach any value: at most 32 passes,
and two or three for a row that keeps thousands. One program has a row to itself and sums in a fixed order: the other
requests of the batch do not matter.

Masses are summed in another order than in ``target_probs``, and logits may differ whose float32 probabilities do
not: a cut may fall differently if a mass is within some 1e-6 of p, or a weight within as much of min-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.sampling import NO_TOP_K

_NO_TOP_K = tl.constexpr(NO_TOP_K)
# exp(-110) is 0 in float32 as it is in the reference: what lies further below the largest logit has no mass.
_DEPTH = tl.constexpr(110.0)
_COMPARED = tl.constexpr(16)  # maxima at a time
_LEAST = tl.constexpr(-3e38)
_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)
_SMALLEST_KEY = tl.constexpr(-0x80000000)


@triton.jit
def is_kept(logits, tokens, cut, last) -> tl.tensor:
    """Return whether tokens are above the cut of their row, or at it and not too late."""
    return (logits > cut) | ((logits == cut) & (tokens <= last))


@triton.jit
def _order_key(logits):
    """int32 in the order of the float32 ``logits``; it is its own inverse, except that -0 and 0 are one value."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LARGEST_KEY)


@triton.jit
def _value(key):
    """Return the float32 of a scalar key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & _LARGEST_KEY)).to(tl.float32, bitcast=True)


@triton.jit
def _tile_logits(logits_ptr, tile, vocab_size, TILE: tl.constexpr):
    """Return the tokens and float32 logits of a tile of a row; -inf past the vocabulary."""
    tokens = tile * TILE + tl.arange(0, TILE)
    return tokens, tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _lower_bound(
    tile_max_ptr,
    tile_max,
    num_tiles,
    largest,
    total,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab_size,
    BLOCK_T: tl.constexpr,
):
    """Return a value at or below the cut."""
    bound = tl.maximum(largest - _DEPTH * temperature, _LEAST)
    if top_k <= num_tiles:
        reaching = tl.zeros([BLOCK_T], tl.int32)  # tiles that reach a tile's maximum, itself included
        for start in range(0, num_tiles, _COMPARED):
            others = start + tl.arange(0, _COMPARED)
            maxima = tl.load(tile_max_ptr + others, mask=others < num_tiles, other=float("-inf"))
            reaching += tl.sum((maxima[None, :] >= tile_max[:, None]).to(tl.int32), 1)
        bound = tl.maximum(bound, tl.max(tl.where(reaching >= top_k, tile_max, float("-inf")), 0))
    # Half of it, and a little of min-p, so that rounding cannot lift the bound above the cut.
    needless = tl.where(top_p < 1.0, 0.5 * (1.0 - top_p) * total / vocab_size, 1.0)
    bound = tl.where(top_p < 1.0, tl.maximum(bound, largest + temperature * tl.log(needless)), bound)
    least = tl.log(tl.where(min_p > 0.0, min_p, 1.0)) - 1e-3
    return tl.where(min_p > 0.0, tl.maximum(bound, largest + temperature * least), bound)


@triton.jit
def _collect(
    logits_ptr, tile_max_ptr, candidates_ptr, low, high, vocab_size, num_tiles, TILE: tl.constexpr, ROOM: tl.constexpr
):
    """Count the logits of the row with keys in [low, high], and write the first ROOM of them out."""
    count = 0
    least = _value(low)
    low = low.to(tl.int32)
    high = high.to(tl.int32)
    for tile in range(num_tiles):
        if tl.load(tile_max_ptr + tile) >= least:
            _tokens, logits = _tile_logits(logits_ptr, tile, vocab_size, TILE)
            keys = _order_key(logits)
            # Nothing past the vocabulary: the key of -inf is below every bound.
            chosen = ((keys >= low) & (keys <= high)).to(tl.int32)
            num_chosen = tl.sum(chosen, 0)
            if num_chosen > 0:
                at = count + tl.cumsum(chosen, 0) - 1
                tl.store(candidates_ptr + at, logits, mask=(chosen > 0) & (at < ROOM))
                count += num_chosen
    return count


@triton.jit
def _quarter(low, high, part, by_value):
    """Return the key a quarter, half or three quarters of the way up, in [low, high); by value or by key."""
    fraction = part * 0.25
    value = _value(low) * (1.0 - fraction) + _value(high) * fraction
    key = tl.where(by_value, _order_key(value).to(tl.int64), low + ((high - low) * part >> 2))
    return tl.minimum(tl.maximum(key, low), high - 1)


@triton.jit
def _reaches(key, min_p, largest, temperature):
    """Return whether logits of this key are likely enough for min-p; otherwise the cut is above the key."""
    return tl.exp((_value(key) - largest) / temperature) >= min_p


@triton.jit
def _narrow(
    logits_ptr,
    tile_max_ptr,
    low,
    high,
    num_above,
    mass_above,
    count,
    by_value,
    top_k,
    most_mass,
    min_p,
    largest,
    temperature,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
):
    """One pass over the row: the quarter of [low, high] with the cut, what is above it and how many tokens are in it.

    The ends move on to keys that occur in the interval, so that a tie of many tokens is soon alone in it.
    """
    key_1 = _quarter(low, high, 1, by_value)
    key_2 = _quarter(low, high, 2, by_value)
    key_3 = _quarter(low, high, 3, by_value)
    nums_1 = tl.zeros([TILE // 2], tl.int32)
    nums_2 = tl.zeros([TILE // 2], tl.int32)
    nums_3 = tl.zeros([TILE // 2], tl.int32)
    masses_1 = tl.zeros([TILE // 2], tl.float32)
    masses_2 = tl.zeros([TILE // 2], tl.float32)
    masses_3 = tl.zeros([TILE // 2], tl.float32)
    lowest = tl.full([TILE // 2], _LARGEST_KEY, tl.int32)
    highest = tl.full([TILE // 2], _SMALLEST_KEY, tl.int32)
    least = _value(low)
    bound_0, bound_4 = low.to(tl.int32), high.to(tl.int32)
    bound_1, bound_2, bound_3 = key_1.to(tl.int32), key_2.to(tl.int32), key_3.to(tl.int32)
    for half in range(2 * num_tiles):  # half a tile, for registers' sake
        if tl.load(tile_max_ptr + half // 2) >= least:
            _tokens, logits = _tile_logits(logits_ptr, half, vocab_size, TILE // 2)
            keys = _order_key(logits)
            weights = tl.exp((logits - largest) / temperature)
            nums_1 += (keys > bound_1).to(tl.int32)
            nums_2 += (keys > bound_2).to(tl.int32)
            nums_3 += (keys > bound_3).to(tl.int32)
            masses_1 += tl.where(keys > bound_1, weights, 0.0)
            masses_2 += tl.where(keys > bound_2, weights, 0.0)
            masses_3 += tl.where(keys > bound_3, weights, 0.0)
            lowest = tl.minimum(lowest, tl.where(keys >= bound_0, keys, _LARGEST_KEY))
            highest = tl.maximum(highest, tl.where(keys <= bound_4, keys, _SMALLEST_KEY))
    num_1, num_2, num_3 = tl.sum(nums_1, 0), tl.sum(nums_2, 0), tl.sum(nums_3, 0)
    mass_1, mass_2, mass_3 = tl.sum(masses_1, 0), tl.sum(masses_2, 0), tl.sum(masses_3, 0)
    kept_1 = (num_1 < top_k) & (mass_1 <= most_mass) & _reaches(key_1, min_p, largest, temperature)
    kept_2 = (num_2 < top_k) & (mass_2 <= most_mass) & _reaches(key_2, min_p, largest, temperature)
    kept_3 = (num_3 < top_k) & (mass_3 <= most_mass) & _reaches(key_3, min_p, largest, temperature)
    from_low = num_above + count
    from_low = tl.where(kept_1, from_low, tl.where(kept_2, num_1, tl.where(kept_3, num_2, num_3)))
    low = tl.where(kept_1, low, tl.where(kept_2, key_1 + 1, tl.where(kept_3, key_2 + 1, key_3 + 1)))
    high = tl.where(kept_1, key_1, tl.where(kept_2, key_2, tl.where(kept_3, key_3, high)))
    num_above = tl.where(kept_1, num_1, tl.where(kept_2, num_2, tl.where(kept_3, num_3, num_above)))
    mass_above = tl.where(kept_1, mass_1, tl.where(kept_2, mass_2, tl.where(kept_3, mass_3, mass_above)))
    low = tl.minimum(tl.maximum(low, tl.min(lowest, 0).to(tl.int64)), high)
    high = tl.maximum(tl.minimum(high, tl.max(highest, 0).to(tl.int64)), low)
    return low, high, num_above, mass_above, from_low - num_above


@triton.jit
def _bisect(
    candidates_ptr,
    count,
    low,
    high,
    num_above,
    mass_above,
    top_k,
    most_mass,
    min_p,
    largest,
    temperature,
    ROOM: tl.constexpr,
):
    """Return the key of the cut among all tokens of [low, high], what is above it, and how many tokens have it."""
    indices = tl.arange(0, ROOM)
    known = indices < count
    values = tl.load(candidates_ptr + indices, mask=known, other=0.0)
    keys = _order_key(values)
    weights = tl.where(known, tl.exp((values - largest) / temperature), 0.0)
    # Min-p is a bound like others; below, only top-k and top-p decide.
    lowest = tl.min(tl.where(known & (weights >= min_p), keys, _LARGEST_KEY), 0).to(tl.int64)
    low = tl.maximum(low, tl.minimum(lowest, high))
    while low < high:
        middle = (low + high) >> 1
        above = known & (keys > middle.to(tl.int32))
        num = num_above + tl.sum(above.to(tl.int32), 0)
        mass = mass_above + tl.sum(tl.where(above, weights, 0.0), 0)
        kept = (num < top_k) & (mass <= most_mass)
        # On to the next key that occurs: the largest one up to the middle, or the smallest above it. ~ turns the order.
        is_next = known & (above != kept)
        reached = tl.max(tl.where(is_next, tl.where(kept, keys, ~keys), _SMALLEST_KEY), 0)
        low = tl.where(kept, low, (~reached).to(tl.int64))
        high = tl.where(kept, reached.to(tl.int64), high)
    above = known & (keys > low.to(tl.int32))
    num_tied = tl.sum((known & (keys == low.to(tl.int32))).to(tl.int32), 0)
    num_above += tl.sum(above.to(tl.int32), 0)
    mass_above += tl.sum(tl.where(above, weights, 0.0), 0)
    return low, num_above, mass_above, num_tied


@triton.jit
def _last_tied(logits_ptr, tile_max_ptr, cut, room, vocab_size, num_tiles, TILE: tl.constexpr):
    """Return the ``room``-th token of the row, in order of ids, whose key is ``cut``."""
    last = vocab_size
    seen = 0
    value = _value(cut)
    for tile in range(num_tiles):
        if (seen < room) & (tl.load(tile_max_ptr + tile) >= value):
            tokens, logits = _tile_logits(logits_ptr, tile, vocab_size, TILE)
            tied = (_order_key(logits) == cut.to(tl.int32)).to(tl.int32)
            rank = seen + tl.cumsum(tied, 0)
            seen += tl.sum(tied, 0)
            if seen >= room:
                last = tl.min(tl.where((tied > 0) & (rank == room), tokens, vocab_size), 0)
    return last


# Columns of one tensor, whose alignment changes with the size of the batch.
@triton.jit(
    do_not_specialize=["gamma"],
    do_not_specialize_on_alignment=["temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr"],
)
def filter_kernel(
    verify_lens_ptr,
    logits_ptr,
    indptr_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    candidates_ptr,
    cut_ptr,
    last_ptr,
    log_mass_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    gamma,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # >= num_tiles
    ROOM: tl.constexpr,
) -> None:
    """Grid (bs, gamma + 1): what is kept of the row of a slot, and the logarithm of its mass.

    Slots of greedy requests and slots without a row are left out; rows without a filter, or that are no distribution
    (NaN, +inf, nothing but -inf), are kept whole.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    first = tl.load(indptr_ptr + request).to(tl.int64)
    num_rows = tl.load(indptr_ptr + request + 1).to(tl.int64) - first
    verify_len = tl.load(verify_lens_ptr + request).to(tl.int64)
    temperature = tl.load(temperatures_ptr + request)
    if (slot <= tl.minimum(verify_len, gamma)) & (slot < num_rows) & (temperature > 0):
        row = first + slot
        row_ptr = logits_ptr + row * row_stride
        row_max_ptr = tile_max_ptr + row * num_tiles
        tiles = tl.arange(0, BLOCK_T)
        tile_max = tl.load(row_max_ptr + tiles, mask=tiles < num_tiles, other=float("-inf"))
        tile_sum = tl.load(tile_sum_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
        largest = tl.max(tile_max, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tile_sum * tl.exp((tile_max - base) / temperature), 0)
        kept_mass = tl.where(total > 0, total, 1.0)
        cut_value = tl.full([], float("-inf"), tl.float32)
        last = vocab_size

        top_k = tl.load(top_ks_ptr + request)
        top_p = tl.load(top_ps_ptr + request)
        min_p = tl.load(min_ps_ptr + request)
        is_filtered = (top_k < _NO_TOP_K) | (top_p < 1.0) | (min_p > 0.0)
        is_distribution = (largest < float("inf")) & (largest > float("-inf")) & (total > 0)
        if is_filtered & is_distribution:
            found_ptr = candidates_ptr + row * ROOM
            most_mass = tl.where(top_p < 1.0, top_p * total, float("inf"))
            bound = _lower_bound(
                row_max_ptr,
                tile_max,
                num_tiles,
                largest,
                total,
                temperature,
                top_k,
                top_p,
                min_p,
                vocab_size,
                BLOCK_T=BLOCK_T,
            )
            # The cut is in [low, high]. Scalars of 64 bits, which sums of two keys do not overflow.
            low = _order_key(bound).to(tl.int64)
            high = _order_key(largest).to(tl.int64)
            num_above = 0  # tokens above high, and their mass
            mass_above = tl.full([], 0.0, tl.float32)
            count = _collect(row_ptr, row_max_ptr, found_ptr, low, high, vocab_size, num_tiles, TILE=TILE, ROOM=ROOM)
            by_value = True
            while (count > ROOM) & (low < high):
                low, high, num_above, mass_above, count = _narrow(
                    row_ptr,
                    row_max_ptr,
                    low,
                    high,
                    num_above,
                    mass_above,
                    count,
                    by_value,
                    top_k,
                    most_mass,
                    min_p,
                    largest,
                    temperature,
                    vocab_size,
                    num_tiles,
                    TILE=TILE,
                )
                by_value = by_value == 0
                if count <= ROOM:
                    tl.debug_barrier()  # what was written before is overwritten
                    _collect(row_ptr, row_max_ptr, found_ptr, low, high, vocab_size, num_tiles, TILE=TILE, ROOM=ROOM)
            cut = low
            num_tied = count
            if count <= ROOM:
                tl.debug_barrier()  # threads read what others have written
                cut, num_above, mass_above, num_tied = _bisect(
                    found_ptr,
                    count,
                    low,
                    high,
                    num_above,
                    mass_above,
                    top_k,
                    most_mass,
                    min_p,
                    largest,
                    temperature,
                    ROOM=ROOM,
                )
            # Of the tokens at the cut as many of the lowest ids as top-k and top-p have room for.
            cut_value = _value(cut)
            weight = tl.exp((cut_value - largest) / temperature)
            num_tied = tl.where(weight >= min_p, num_tied, 0)
            last = tl.where(num_tied > 0, vocab_size, -1)
            limited = (top_p < 1.0) & (weight > 0)
            # Division as in IEEE: the token that starts at exactly p stays.
            fitting = tl.floor(tl.div_rn(most_mass - mass_above, tl.where(limited, weight, 1.0))) + 1.0
            fitting = tl.where(limited, fitting, float("inf"))
            fitting = tl.minimum(tl.maximum(fitting, 1.0), num_tied.to(tl.float32)).to(tl.int32)
            room = tl.minimum(fitting.to(tl.int64), top_k - num_above).to(tl.int32)
            if room < num_tied:
                last = _last_tied(row_ptr, row_max_ptr, cut, room, vocab_size, num_tiles, TILE=TILE)
            kept_mass = mass_above + room * weight
        tl.store(cut_ptr + row, cut_value)
        tl.store(last_ptr + row, last)
        tl.store(log_mass_ptr + row, tl.log(kept_mass))
