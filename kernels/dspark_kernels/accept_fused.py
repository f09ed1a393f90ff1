"""Verification on the device, for any mixture of greedy, sampled, filtered and seeded requests.

Greedy batches take two launches, others four, with top-k, top-p or min-p one more and with seeds one more; nothing is
read back, and no tensor of probabilities is written:

1. statistics of every row by tiles of the vocabulary: largest logit, its token and, where anything is sampled, the sum
   of the exponentials at the request's temperature;
2. rows of filtered requests: where top-k, top-p and min-p cut them (``accept_filter_kernel``);
3. rows of seeded requests, by tiles: their draws (``accept_seeded_kernel``);
4. per request: combine the tiles, judge the drafts, write lengths and tokens;
5. sampled requests, by tiles: an exponential race over the weights of the one row that the next token is drawn from;
6. per sampled request: the winner of the tiles.

A race draws token y with probability w_y / sum(w): every token finishes after E_y / w_y with its own unit-rate
exponential E_y, and the first one wins. It needs no sum before the draw, so that tiles can run side by side, and for
(p_t - p_d)+ no normalisation.

What has to be moved: the logits once, N * V values; for sampled requests one row of them again, and after a rejection
one row of the draft's law. For 256 requests with 7 drafts each, 151936 tokens and bfloat16 logits that is 0.62 GB, or
0.86 GB when all are sampled and rejected. A filter reads the tiles of its rows again that reach the bound of the cut
(with top-k = 20 about 20 of 75), and once more where it cuts a tie; seeds read their rows once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from .accept import Accepted, accept_ref
from .accept_filter_kernel import filter_kernel
from .accept_kernel import finish_kernel, judge_kernel, race_kernel, row_stats_kernel
from .accept_seeded_kernel import seeded_kernel
from .draft_law import DraftLaw
from .noise import RoundKeys
from .sampling_params import LawParams, SamplingRows

# 8 KiB of bfloat16: 8 rows of 151936 tokens make 304 programs, two for each multiprocessor of an H200.
_STATS_TILE = 4096
# With filters or seeds. The maxima of 75 tiles bound the cut of top-k <= 75, closer the more tiles there are, and a
# program of seeds holds the generator's words of a whole tile.
_FINE_TILE = 2048
_RACE_TILE = 2048
# Logits of a row that a filter searches in registers: 8 for each of 256 threads.
_CANDIDATES = 2048
_FILTER_WARPS = 8
_FILTER_REGISTERS = 80  # room for three programs on a multiprocessor; unlimited the compiler takes 110
_MIN_TILE = 64
_OWNERS_BLOCK = 256


def accept(
    draft_tokens: torch.Tensor,  # [bs, gamma] int64
    verify_lens: torch.Tensor,  # [bs] int
    target_logits: torch.Tensor,  # [N, V]
    indptr: torch.Tensor,  # [bs + 1] int
    proposal: DraftLaw | torch.Tensor | None,
    rows: SamplingRows,
    keys: RoundKeys,
    *,
    copied: torch.Tensor | None = None,  # [bs, gamma] bool
    prefix_lens: torch.Tensor | None = None,  # [bs] int64
) -> Accepted:
    """Judge the drafts of every request, with kernels where these can: see :func:`accept_ref`.

    Batches without a GPU, and drafts of sampled requests whose law is given as probabilities, go to the reference;
    which of the two runs is known on the host.

    Args:
        draft_tokens: as in :func:`accept_ref`.
        verify_lens: likewise.
        target_logits: likewise; float32, float16 or bfloat16, rows contiguous.
        indptr: likewise.
        proposal: the law that drafts were drawn from, or probabilities [bs, gamma, V]; None when every draft is a
            copied token. Read for sampled requests only.
        rows: sampling parameters of the bs requests.
        keys: noise keys of this round.
        copied: drafts whose proposal is one-hot at the token itself, whatever ``proposal`` says.
        prefix_lens: committed tokens of each request; given to have ``new_seq_lens``.

    Returns:
        The outcome. No host sync.

    Raises:
        ValueError: draft and target disagree on the vocabulary or the block.
    """
    on_kernels = target_logits.is_cuda or triton.knobs.runtime.interpret
    if on_kernels and not (rows.any_sampled and isinstance(proposal, torch.Tensor)):
        return accept_fused(
            draft_tokens,
            verify_lens,
            target_logits,
            indptr,
            proposal if rows.any_sampled and isinstance(proposal, DraftLaw) else None,
            None if rows.all_greedy else rows.draw_temperatures,
            keys,
            copied=copied,
            prefix_lens=prefix_lens,
            filters=rows.law if rows.any_filter else None,
            seeds=(rows.seeds, rows.is_seeded) if rows.any_seeded else None,
        )
    if isinstance(proposal, DraftLaw):
        proposal = proposal.probs() if rows.any_sampled else None
    accepted = accept_ref(draft_tokens, verify_lens, target_logits, indptr, proposal, rows, keys, copied)
    if prefix_lens is None:
        return accepted
    return replace(accepted, new_seq_lens=prefix_lens + accepted.accepted_lens + 1)


def accept_fused(
    draft_tokens: torch.Tensor,  # [bs, gamma] int64
    verify_lens: torch.Tensor,  # [bs] int
    target_logits: torch.Tensor,  # [N, V]
    indptr: torch.Tensor,  # [bs + 1] int
    law: DraftLaw | None,
    temperatures: torch.Tensor | None,  # [bs] float32
    keys: RoundKeys,
    *,
    copied: torch.Tensor | None = None,  # [bs, gamma] bool
    prefix_lens: torch.Tensor | None = None,  # [bs] int64
    filters: LawParams | None = None,
    seeds: tuple[torch.Tensor, torch.Tensor] | None = None,  # [bs] int64, [bs] bool
) -> Accepted:
    """The kernels alone: every fact about a request is a tensor, so that a CUDA graph of them serves any batch.

    A slot of the batch without a request has no rows (``indptr`` repeats its end) or one row of anything; it keeps 0
    drafts and gets some valid token. Rows from ``indptr[bs]`` on are not read.

    Args:
        draft_tokens: as in :func:`accept_ref`.
        verify_lens: likewise; what exceeds gamma or the request's rows is ignored.
        target_logits: likewise; float32, float16 or bfloat16, rows contiguous.
        indptr: likewise.
        law: the law that drafts were drawn from; None when every draft is a copied token. Read for sampled requests
            only.
        temperatures: 0 for greedy requests; None when all are greedy, which needs no noise and half the launches.
        keys: noise keys of this round. An int ``step`` costs a launch and is frozen in a graph.
        copied: drafts whose proposal is one-hot at the token itself, whatever ``law`` says.
        prefix_lens: committed tokens of each request; given to have ``new_seq_lens``.
        filters: top-k, top-p and min-p of every request; its temperatures and host bounds are not read. None when no
            request has any, which saves a launch. Read with ``temperatures`` only, as are ``seeds``.
        seeds: the requests' own seeds, and which requests draw with them; None when none does, which saves a launch.

    Returns:
        The outcome. No host sync; safe under graph capture.

    Raises:
        ValueError: draft and target disagree on the vocabulary or the block.
    """
    bs, gamma = draft_tokens.shape
    num_rows, vocab_size = target_logits.shape
    device = target_logits.device
    if target_logits.stride(1) != 1:
        raise ValueError("target_logits must have contiguous rows; pass a [N, V] tensor, not its transpose")
    sampled = temperatures is not None
    if not sampled:
        filters = seeds = None
    if not sampled or gamma == 0:
        law = copied = None
    if law is not None:
        _check_law(law, bs, gamma, vocab_size)
    if draft_tokens.stride(1) != 1:
        draft_tokens = draft_tokens.contiguous()

    tile = _tile(_STATS_TILE if filters is None and seeds is None else _FINE_TILE, vocab_size)
    num_tiles = triton.cdiv(vocab_size, tile)
    block_tiles = triton.next_power_of_2(num_tiles)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    lens, bonus = draft_tokens.new_empty(bs), draft_tokens.new_empty(bs)
    out_tokens = draft_tokens.new_empty(bs, gamma + 1)
    new_seq_lens = None if prefix_lens is None else draft_tokens.new_empty(bs)
    rows: dict[str, Any] = {
        "logits_ptr": target_logits,
        "indptr_ptr": indptr,
        "temperatures_ptr": temperatures,
        "row_stride": target_logits.stride(0),
        "vocab_size": vocab_size,
    }
    tiles: dict[str, Any] = {
        "tile_max_ptr": floats(num_rows, num_tiles),
        "tile_token_ptr": ints(num_rows, num_tiles),
        "tile_sum_ptr": floats(num_rows, num_tiles) if sampled else None,
        "num_tiles": num_tiles,
    }
    drafts: dict[str, Any] = {
        "draft_tokens_ptr": draft_tokens,
        "drafts_stride": draft_tokens.stride(0),
        "gamma": gamma,
        "scores_ptr": None if law is None else law.scores,
        "scores_stride_b": 0 if law is None else law.scores.stride(0),
        "scores_stride_g": 0 if law is None else law.scores.stride(1),
        "log_norms_ptr": None if law is None else law.log_norms.contiguous(),
        "columns_ptr": None if law is None else law.columns,
        "copied_ptr": None if law is None or copied is None else copied.contiguous().view(torch.uint8),
        "HAS_LAW": law is not None,
        "HAS_COLUMNS": law is not None and law.columns is not None,
        "HAS_COPIED": law is not None and copied is not None,
    }
    noise: dict[str, Any] = {
        "seed": keys.signed_seed,
        "step_ptr": keys.device_step if sampled else None,
        "request_keys_ptr": keys.request_keys if sampled else None,
    }
    draw: dict[str, Any] = {
        "lens_ptr": lens,
        "source_ptr": ints(bs) if sampled else None,
        "log_norm_ptr": floats(bs) if sampled else None,
    }
    cuts: dict[str, Any] = {
        "cut_ptr": None if filters is None else floats(num_rows),
        "last_ptr": None if filters is None else ints(num_rows),
    }
    row_log_norms = None if filters is None else floats(num_rows)
    drawn: dict[str, Any] = {
        "is_seeded_ptr": None if seeds is None else seeds[1].view(torch.uint8),
        "seeded_speed_ptr": None if seeds is None else floats(num_rows, num_tiles),
        "seeded_token_ptr": None if seeds is None else ints(num_rows, num_tiles),
    }
    row_stats_kernel[(num_rows, num_tiles)](**rows, **tiles, bs=bs, SAMPLED=sampled, TILE=tile, BLOCK_B=_OWNERS_BLOCK)
    if filters is not None:
        filter_kernel[(bs, gamma + 1)](
            **rows,
            **cuts,
            verify_lens_ptr=verify_lens,
            top_ks_ptr=filters.top_ks,
            top_ps_ptr=filters.top_ps,
            min_ps_ptr=filters.min_ps,
            tile_max_ptr=tiles["tile_max_ptr"],
            tile_sum_ptr=tiles["tile_sum_ptr"],
            candidates_ptr=floats(num_rows, _CANDIDATES),
            log_norm_ptr=row_log_norms,
            num_tiles=num_tiles,
            gamma=gamma,
            TILE=tile,
            BLOCK_T=block_tiles,
            ROOM=_CANDIDATES,
            num_warps=_FILTER_WARPS,
            maxnreg=_FILTER_REGISTERS,
        )
    if seeds is not None:
        seeded_kernel[(bs, gamma + 1, num_tiles)](
            **rows,
            **cuts,
            **drawn,
            verify_lens_ptr=verify_lens,
            seeds_ptr=seeds[0],
            positions_ptr=keys.positions,
            tile_max_ptr=tiles["tile_max_ptr"],
            num_tiles=num_tiles,
            gamma=gamma,
            HAS_FILTER=filters is not None,
            TILE=tile,
            BLOCK_T=block_tiles,
        )
    judge_kernel[(bs,)](
        **rows,
        **tiles,
        **drafts,
        **noise,
        **draw,
        **cuts,
        **drawn,
        row_log_norm_ptr=row_log_norms,
        verify_lens_ptr=verify_lens,
        prefix_lens_ptr=prefix_lens,
        bonus_ptr=bonus,
        out_tokens_ptr=out_tokens,
        new_seq_lens_ptr=new_seq_lens,
        SAMPLED=sampled,
        HAS_FILTER=filters is not None,
        HAS_SEEDS=seeds is not None,
        HAS_PREFIX=prefix_lens is not None,
        BLOCK_S=triton.next_power_of_2(gamma + 1),
        BLOCK_T=block_tiles,
    )
    if sampled:
        race_tile = _tile(_RACE_TILE, vocab_size)
        num_race_tiles = triton.cdiv(vocab_size, race_tile)
        winners: dict[str, Any] = {
            "tile_mass_ptr": floats(bs, num_race_tiles),
            "winner_ptr": floats(bs, num_race_tiles),
            "winner_token_ptr": ints(bs, num_race_tiles),
            "target_winner_ptr": floats(bs, num_race_tiles),
            "target_winner_token_ptr": ints(bs, num_race_tiles),
            "num_tiles": num_race_tiles,
        }
        race_kernel[(bs, num_race_tiles)](
            **rows, **drafts, **noise, **draw, **cuts, **winners, HAS_FILTER=filters is not None, TILE=race_tile
        )
        finish_kernel[(bs,)](
            lens_ptr=lens,
            source_ptr=draw["source_ptr"],
            **winners,
            bonus_ptr=bonus,
            out_tokens_ptr=out_tokens,
            gamma=gamma,
            vocab_size=vocab_size,
            BLOCK_T=triton.next_power_of_2(num_race_tiles),
        )
    return Accepted(lens, bonus, out_tokens, new_seq_lens)


def _check_law(law: DraftLaw, bs: int, gamma: int, vocab_size: int) -> None:
    law_vocab_size = law.scores.shape[2] if law.columns is None else law.columns.shape[0]
    if law.scores.shape[:2] != (bs, gamma) or law.log_norms.shape != (bs, gamma) or law_vocab_size != vocab_size:
        raise ValueError(
            f"the draft law has scores {tuple(law.scores.shape)} over {law_vocab_size} tokens where [bs, gamma] and V "
            f"of the drafts and the target are {(bs, gamma)} and {vocab_size}; use a draft model with the target's "
            "vocabulary"
        )
    if law.scores.stride(2) != 1:
        raise ValueError("the scores of the draft law must have contiguous rows")


def _tile(most: int, vocab_size: int) -> int:
    return max(_MIN_TILE, min(most, triton.next_power_of_2(vocab_size)))
