"""Find what followed the end of a request's text where that stood before: candidates for what comes next.

The text is read where its K/V lies: token i of a request is that of the slot ``req_to_token[row, i]``. Of all places
after tokens that are those of the text's end, the one with the most of them is taken, as far as they count, and the
latest of equals (prompt lookup: Saxena 2023). A passage that runs into the end of the text begins again: a text that
has repeated itself is likely to go on.

Bytes: 12 per token of context, for its slot and its token; where the last token does not match, no other is read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import num_processors, on_kernels
from dspark_kernels.drafting.heads import (
    CACHED_ROWS,
    FIRST,
    LEAST_COLUMN,
    LENGTH_COLUMN,
    MOST_COLUMN,
    MOST_MATCH,
    ROW_COLUMN,
    ChainRules,
    usual_bounds,
)
from dspark_kernels.preparation import StepRequests
from dspark_kernels.sampling import reads_are_free

_TILE = 1024
# Columns of bounds and chains, for kernels.
_LEAST_AT, _MOST_AT, _LENGTH_AT = tl.constexpr(LEAST_COLUMN), tl.constexpr(MOST_COLUMN), tl.constexpr(LENGTH_COLUMN)
_ROW_AT, _FIRST_AT, _MOST_MATCH = tl.constexpr(ROW_COLUMN), tl.constexpr(FIRST), tl.constexpr(MOST_MATCH)
_MOST_PROGRAMS = 64  # that share one request's text


def find_chains(
    requests: StepRequests,
    slot_tokens: torch.Tensor,  # [slots] int64
    num_candidates: int,
    rules: ChainRules | None = None,
) -> torch.Tensor:
    """Return the chains of :func:`suffix_match`, and in the place of some what their second text goes on with.

    Of the places where that matches as far as it asks for, the one that matches farthest is taken, and the first of
    equals. What was asked for comes before all else; of chains that compete, the one that matches farther is taken, and
    of equals the request's own. No host sync.
    """
    chains = suffix_match(requests, slot_tokens, num_candidates, rules)
    if rules is None or rules.second is None:
        return chains
    second, device = rules.second, chains.device
    size, owners = len(second.tokens), second.requests
    # Places that belong to no request find what equals nothing.
    suffix = torch.nn.functional.pad(_suffix(requests, slot_tokens), (0, 0, 0, 1), value=-2).T.contiguous()
    text = torch.nn.functional.pad(second.tokens, (MOST_MATCH, num_candidates + 1), value=-1)
    lengths = _matched(text, size, lambda back: suffix[back].index_select(0, owners))
    # One number for a place, of which the largest is the best: matched tokens with their row, then how early it is.
    scores = (lengths + second.rows) * size + torch.arange(size - 1, -1, -1, device=device)
    nothing = torch.full((len(requests) + 1,), -1, device=device)
    best = nothing.scatter_reduce(0, owners, scores.where(lengths >= second.needed, -1), "amax")[:-1, None]
    # A row of what was asked for is above all matches of what competes.
    matched, place = best // size, size - 1 - best % size
    is_found = (best >= 0) & (matched - CACHED_ROWS > chains[:, :1])
    places = torch.arange(num_candidates, device=device)
    following = text[MOST_MATCH + place + 1 + places]
    # The text after a -1 is another one's.
    is_there = (places < rules.bounds[:, LENGTH_COLUMN, None]) & ((following >= 0).cumprod(1) > 0)
    found = torch.cat([matched, torch.zeros_like(matched), following.where(is_there, -1)], 1)
    return torch.where(is_found, found, chains)


def suffix_match_ref(
    requests: StepRequests,
    slot_tokens: torch.Tensor,  # [slots] int64
    num_candidates: int,
    rules: ChainRules | None = None,
) -> torch.Tensor:
    """Compute the same as :func:`suffix_match` in plain torch, for texts whose lengths the host may read."""
    last = requests.prefix_lens.to(torch.int64)[:, None]  # [bs, 1] position of the anchor
    width = max(1, int(last.max()))
    slots = requests.req_to_token[requests.req_pool_indices, :width]
    text = torch.nn.functional.pad(slot_tokens[slots.long()], (MOST_MATCH, 1), value=-1)
    text.scatter_(1, MOST_MATCH + last, requests.anchors.to(torch.int64)[:, None])

    bounds, suffix = _bounds(requests, rules), _suffix(requests, slot_tokens)
    ends = torch.arange(width, device=text.device)
    lengths = _matched(text, width, lambda back: suffix[:, back, None]).where(ends < last, 0)
    lengths = torch.minimum(lengths, bounds[:, MOST_COLUMN, None])
    best = (lengths * width + ends).argmax(1, keepdim=True)
    matched = lengths.gather(1, best)
    matched = matched.where(matched >= bounds[:, LEAST_COLUMN, None], 0)
    lanes = torch.arange(num_candidates, device=text.device)
    following = MOST_MATCH + best + 1 + lanes % (last - best).clamp_min(1)
    tokens = text.gather(1, following.clamp_max(MOST_MATCH + width))
    tokens = tokens.where((matched > 0) & (lanes < bounds[:, LENGTH_COLUMN, None]), -1)
    return torch.cat([matched + bounds[:, ROW_COLUMN, None] * (matched > 0), torch.zeros_like(matched), tokens], 1)


def _suffix(requests: StepRequests, slot_tokens: torch.Tensor) -> torch.Tensor:
    """[bs, MOST_MATCH] int64, the last tokens of requests' texts, the anchor first; -2 for what equals nothing."""
    places = requests.prefix_lens.to(torch.int64)[:, None] - torch.arange(1, MOST_MATCH, device=slot_tokens.device)
    slots = requests.req_to_token[requests.req_pool_indices[:, None].long(), places.clamp_min(0)]
    before = slot_tokens[slots.long()].where(places >= 0, -1)
    suffix = torch.cat([requests.anchors.to(torch.int64)[:, None], before], 1)
    return suffix.masked_fill(suffix < 0, -2)


def _matched(text: torch.Tensor, width: int, wanted: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return how many tokens up to each place of texts are the ends of requests' own.

    Args:
        text: [..., at least MOST_MATCH + width] int64, after MOST_MATCH places that nothing equals.
        width: places that are asked about.
        wanted: returns the token before the last ``back`` ones of the requests' texts, to be compared at every place.

    Returns:
        [..., width] int64.
    """
    lengths = torch.zeros_like(text[..., :width])
    matches = lengths == 0
    for back in range(MOST_MATCH):
        matches = matches & (text[..., MOST_MATCH - back :][..., :width] == wanted(back))
        if reads_are_free(text) and not matches.any():
            break
        lengths += matches
    return lengths


def _bounds(requests: StepRequests, rules: ChainRules | None) -> torch.Tensor:
    """[bs, 4] int64 of :attr:`ChainRules.bounds`."""
    return usual_bounds(requests.anchors.device).repeat(len(requests), 1) if rules is None else rules.bounds


@triton.jit
def _token(tokens_ptr, table_ptr, positions, mask) -> tl.tensor:
    """Tokens of the text at ``positions`` before the anchor, -1 where masked."""
    slots = tl.load(table_ptr + positions, mask=mask, other=0).to(tl.int64)
    return tl.load(tokens_ptr + slots, mask=mask, other=-1).to(tl.int64)


_SMALL_POINTERS = ["anchors_ptr", "prefix_lens_ptr", "req_pool_indices_ptr", "best_ptr", "bounds_ptr", "chains_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_SMALL_POINTERS[:5])
def _find_kernel(
    tokens_ptr,
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    bounds_ptr,  # [bs, 4] int64
    best_ptr,  # [bs, programs] int64: matched tokens in the upper half, the place after them in the lower one
    table_stride,
    TILE: tl.constexpr,
):
    request, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    last = tl.load(prefix_lens_ptr + request).to(tl.int64)
    table_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request).to(tl.int64) * table_stride
    anchor = tl.load(anchors_ptr + request).to(tl.int64)
    most = tl.load(bounds_ptr + 4 * request + _MOST_AT)
    best = tl.zeros([TILE], tl.int64)
    for tile in range(program, tl.cdiv(last, TILE), num_programs):
        ends = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        matches = ends < last
        lengths = tl.zeros([TILE], tl.int64)
        for back in tl.static_range(_MOST_MATCH):
            wanted = anchor
            if back > 0:
                wanted = _token(tokens_ptr, table_ptr, last - back, last >= back)
            matches = matches & (ends >= back)
            matches = matches & (_token(tokens_ptr, table_ptr, ends - back, matches) == wanted) & (wanted >= 0)
            lengths += matches.to(tl.int64)
        best = tl.maximum(best, (tl.minimum(lengths, most) << 32) + ends + 1)
    tl.store(best_ptr + request * num_programs + program, tl.max(best, 0))


@triton.jit(
    do_not_specialize=["table_stride", "num_programs", "num_candidates"],
    do_not_specialize_on_alignment=_SMALL_POINTERS,
)
def _copy_kernel(
    tokens_ptr,
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    bounds_ptr,
    best_ptr,
    chains_ptr,  # [bs, FIRST + num_candidates] int64
    table_stride,
    num_programs,
    num_candidates,
    BLOCK_P: tl.constexpr,  # >= num_programs
    BLOCK_C: tl.constexpr,  # >= num_candidates
):
    request = tl.program_id(0)
    last = tl.load(prefix_lens_ptr + request).to(tl.int64)
    table_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request).to(tl.int64) * table_stride
    programs = tl.arange(0, BLOCK_P)
    found = tl.load(best_ptr + request * num_programs + programs, mask=programs < num_programs, other=0)
    best = tl.max(found, 0)
    matched = best >> 32
    bounds = bounds_ptr + 4 * request
    is_found = (matched > 0) & (matched >= tl.load(bounds + _LEAST_AT))
    begin = best & 0x7FFFFFFF
    lanes = tl.arange(0, BLOCK_C)
    there = is_found & (lanes < num_candidates) & (lanes < tl.load(bounds + _LENGTH_AT))
    positions = begin + lanes % tl.maximum(last + 1 - begin, 1)
    tokens = _token(tokens_ptr, table_ptr, positions, there & (positions < last))
    anchor = tl.load(anchors_ptr + request).to(tl.int64)
    tokens = tl.where(there & (positions == last), anchor, tokens)
    row = chains_ptr + request.to(tl.int64) * (_FIRST_AT + num_candidates)
    tl.store(row, tl.where(is_found, matched + tl.load(bounds + _ROW_AT), 0))
    tl.store(row + 1, tl.zeros_like(matched))
    tl.store(row + _FIRST_AT + lanes, tokens, mask=lanes < num_candidates)


@on_kernels(suffix_match_ref)
def suffix_match(
    requests: StepRequests,
    slot_tokens: torch.Tensor,  # [slots] int64
    num_candidates: int,
    rules: ChainRules | None = None,
) -> torch.Tensor:
    """Find candidates for the tokens after the anchors, in two launches.

    Args:
        requests: their texts are the tokens of the slots before ``prefix_lens``, and the anchor.
        slot_tokens: the token whose K/V each slot holds; negative where no vocabulary has it (a part of
            a picture), which nothing equals.
        num_candidates: for each request.
        rules: whose bounds are read; None for the usual ones.

    Returns:
        [bs, 2 + num_candidates] int64, see :class:`Candidates`: matched tokens, 0 without a chain; 0; and the
        candidates, -1 where there are none. No host sync; safe under graph capture.
    """
    bs, device = len(requests), slot_tokens.device
    programs = max(1, min(_MOST_PROGRAMS, 2 * num_processors(device) // bs))
    best = torch.empty((bs, programs), dtype=torch.int64, device=device)
    chains = torch.empty((bs, FIRST + num_candidates), dtype=torch.int64, device=device)
    text = (slot_tokens, requests.anchors, requests.prefix_lens, requests.req_pool_indices, requests.req_to_token)
    read, stride = (*text, _bounds(requests, rules), best), requests.req_to_token.stride(0)
    _find_kernel[bs, programs](*read, stride, TILE=_TILE)
    _copy_kernel[(bs,)](
        *read,
        chains,
        stride,
        programs,
        num_candidates,
        BLOCK_P=_MOST_PROGRAMS,
        BLOCK_C=triton.next_power_of_2(num_candidates),
        num_warps=1,
    )
    return chains
