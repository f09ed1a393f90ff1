"""Find what followed the end of a request's text where that stood before: candidates for what comes next.

The text is read where its K/V lies: token i of a request is that of the slot ``req_to_token[row, i]``. Of all places
behind tokens that are those of the text's end, the one with the most of them is taken, up to ``MOST_MATCH``, and the
latest of equals (prompt lookup: Saxena 2023). A passage that runs into the end of the text begins again: a text that
has repeated itself is likely to go on.

Bytes: 12 per token of context, for its slot and its token; where the last token does not match, no other is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.drafting.candidates import FIRST
from dspark_kernels.hardware import num_processors
from dspark_kernels.planning.preparation import StepRequests
from dspark_kernels.sampling.target_distribution import reads_are_free

LEAST_MATCH, MOST_MATCH = 3, 8
"""Tokens of the end that are looked for, at least (unless a request says otherwise) and at most."""
_TILE = 1024
_MOST_PROGRAMS = 64  # that share one request's text


def suffix_match_ref(
    requests: StepRequests,
    slot_tokens: torch.Tensor,  # [slots] int64
    num_candidates: int,
    least_match: torch.Tensor | None = None,  # [bs] int64
) -> torch.Tensor:
    """Compute the same as :func:`suffix_match` in plain torch, for texts whose lengths the host may read."""
    last = requests.prefix_lens.to(torch.int64)[:, None]  # [bs, 1] position of the anchor
    width = max(1, int(last.max()))
    slots = requests.req_to_token[requests.req_pool_indices, :width]
    # Before the text lie places that nothing equals, as nothing equals a token of -1.
    text = torch.nn.functional.pad(slot_tokens[slots.long()], (MOST_MATCH, 1), value=-1)
    text.scatter_(1, MOST_MATCH + last, requests.anchors.to(torch.int64)[:, None])
    suffix = text.gather(1, MOST_MATCH + last - torch.arange(MOST_MATCH, device=text.device))
    suffix = suffix.masked_fill(suffix < 0, -2)

    ends = torch.arange(width, device=text.device)
    matches, lengths = ends < last, torch.zeros_like(text[:, :width])
    for back in range(MOST_MATCH):
        matches = matches & (text[:, MOST_MATCH - back :][:, :width] == suffix[:, back, None])
        if reads_are_free(text) and not matches.any():
            break
        lengths += matches
    best = (lengths * width + ends).argmax(1, keepdim=True)
    matched = lengths.gather(1, best)
    matched = matched.where(matched >= _least(requests, least_match)[:, None], 0)
    places = torch.arange(num_candidates, device=text.device) % (last - best).clamp_min(1)
    behind = (MOST_MATCH + best + 1 + places).clamp_max(MOST_MATCH + width)
    tokens = text.gather(1, behind).where(matched > 0, -1)
    return torch.cat([matched, torch.zeros_like(matched), tokens], 1)


def _least(requests: StepRequests, least_match: torch.Tensor | None) -> torch.Tensor:
    """[bs] int64."""
    if least_match is not None:
        return least_match
    return torch.full((len(requests),), LEAST_MATCH, dtype=torch.int64, device=requests.anchors.device)


@triton.jit
def _token(tokens_ptr, table_ptr, positions, mask) -> tl.tensor:
    """Tokens of the text at ``positions`` before the anchor, -1 where masked."""
    slots = tl.load(table_ptr + positions, mask=mask, other=0).to(tl.int64)
    return tl.load(tokens_ptr + slots, mask=mask, other=-1).to(tl.int64)


_SMALL_POINTERS = ["anchors_ptr", "prefix_lens_ptr", "req_pool_indices_ptr", "best_ptr", "least_ptr", "chains_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_SMALL_POINTERS[:4])
def _find_kernel(
    tokens_ptr,
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    best_ptr,  # [bs, programs] int64: matched tokens in the upper half, the place behind them in the lower one
    table_stride,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    request, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    last = tl.load(prefix_lens_ptr + request).to(tl.int64)
    table_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request).to(tl.int64) * table_stride
    anchor = tl.load(anchors_ptr + request).to(tl.int64)
    best = tl.zeros([TILE], tl.int64)
    for tile in range(program, tl.cdiv(last, TILE), num_programs):
        ends = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        matches = ends < last
        lengths = tl.zeros([TILE], tl.int64)
        for back in tl.static_range(MOST):
            wanted = anchor
            if back > 0:
                wanted = _token(tokens_ptr, table_ptr, last - back, last >= back)
            matches = matches & (ends >= back)
            matches = matches & (_token(tokens_ptr, table_ptr, ends - back, matches) == wanted) & (wanted >= 0)
            lengths += matches.to(tl.int64)
        best = tl.maximum(best, (lengths << 32) + ends + 1)
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
    best_ptr,
    least_ptr,  # [bs] int64
    chains_ptr,  # [bs, FIRST + num_candidates] int64
    table_stride,
    num_programs,
    num_candidates,
    FIRST: tl.constexpr,
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
    matched = tl.where(matched >= tl.load(least_ptr + request), matched, 0)
    begin = best & 0x7FFFFFFF
    lanes = tl.arange(0, BLOCK_C)
    there = (lanes < num_candidates) & (matched > 0)
    positions = begin + lanes % tl.maximum(last + 1 - begin, 1)
    tokens = _token(tokens_ptr, table_ptr, positions, there & (positions < last))
    anchor = tl.load(anchors_ptr + request).to(tl.int64)
    tokens = tl.where(there & (positions == last), anchor, tokens)
    row = chains_ptr + request.to(tl.int64) * (FIRST + num_candidates)
    tl.store(row, matched)
    tl.store(row + 1, tl.zeros_like(matched))
    tl.store(row + FIRST + lanes, tokens, mask=lanes < num_candidates)


@on_kernels(suffix_match_ref)
def suffix_match(
    requests: StepRequests,
    slot_tokens: torch.Tensor,  # [slots] int64
    num_candidates: int,
    least_match: torch.Tensor | None = None,  # [bs] int64
) -> torch.Tensor:
    """Find candidates for the tokens behind the anchors, in two launches.

    Args:
        requests: their texts are the tokens of the slots before ``prefix_lens``, and the anchor.
        slot_tokens: the token whose K/V each slot holds; negative where no vocabulary has it (a part of
            a picture), which nothing equals.
        num_candidates: for each request.
        least_match: matched tokens that each request asks for; None for ``LEAST_MATCH``.

    Returns:
        [bs, 2 + num_candidates] int64, see :class:`Candidates`: matched tokens, 0 without a chain; 0; and the
        candidates, -1 where there are none. No host sync; safe under graph capture.
    """
    bs, device = len(requests), slot_tokens.device
    programs = max(1, min(_MOST_PROGRAMS, 2 * num_processors(device) // bs))
    best = torch.empty((bs, programs), dtype=torch.int64, device=device)
    chains = torch.empty((bs, FIRST + num_candidates), dtype=torch.int64, device=device)
    text = (slot_tokens, requests.anchors, requests.prefix_lens, requests.req_pool_indices, requests.req_to_token)
    stride = requests.req_to_token.stride(0)
    _find_kernel[bs, programs](*text, best, stride, MOST=MOST_MATCH, TILE=_TILE)
    _copy_kernel[(bs,)](
        *text,
        best,
        _least(requests, least_match),
        chains,
        stride,
        programs,
        num_candidates,
        FIRST=FIRST,
        BLOCK_P=_MOST_PROGRAMS,
        BLOCK_C=triton.next_power_of_2(num_candidates),
        num_warps=1,
    )
    return chains
