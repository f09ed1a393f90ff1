"""Verification on the device, for any mixture of greedy, sampled, filtered and seeded requests.

Greedy batches take two launches, others four, with top-k, top-p or min-p one more and with seeds one more; nothing is
read back, and no tensor of probabilities is written:

1. statistics of every row by tiles of the vocabulary: largest logit, its token and, if anything is sampled, the sum
   of the exponentials at the request's temperature;
2. rows of filtered requests: where top-k, top-p and min-p cut them (``acceptance_filters``);
3. rows of seeded requests, by tiles: their draws (``seeded_kernel``);
4. per request: combine the tiles, judge the drafts, write lengths and tokens;
5. sampled requests, by tiles: the mass of what the next token is drawn from, in the one row that is left;
6. per sampled request: the tile, then the token, at which the cumulative mass crosses u times all of it.

(p_t - p_d)+ needs no normalisation for that, and a draw no more than one random number.

What has to be moved: the logits once, N * V values; for sampled requests one row of them again, and after a rejection
one row of the draft's distribution. For 256 requests with 7 drafts each, 151936 tokens and bfloat16 logits that is 0.62
GB, or 0.86 GB when all are sampled and rejected. A filter reads the tiles of its rows again that reach the bound of the
cut (with top-k = 20 about 20 of 75), and once more if it cuts a tie; seeds read their rows once more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from dspark_kernels.acceptance.acceptance_draw import mass_kernel, seeded_kernel, token_kernel
from dspark_kernels.acceptance.acceptance_filters import filter_kernel
from dspark_kernels.acceptance.acceptance_kernels import judge_kernel, row_stats_kernel
from dspark_kernels.acceptance.acceptance_reference import AcceptResult, accept_ref
from dspark_kernels.dispatch import on_kernels
from dspark_kernels.drafting.heads import DraftBlock
from dspark_kernels.noise import RoundKeys
from dspark_kernels.preparation import Windows
from dspark_kernels.sampling import FilterParams, SamplingBatch

# 8 KiB of bfloat16: 8 rows of 151936 tokens make 304 programs, two for each multiprocessor of an H200.
_STATS_TILE = 4096
# With filters or seeds. The maxima of 75 tiles bound the cut of top-k <= 75, closer the more tiles there are, and a
# program of seeds holds the generator's words of a whole tile.
_FINE_TILE = 2048
_DRAW_TILE = 2048
# Logits of a row that a filter searches in registers: 8 for each of 256 threads.
_CANDIDATES = 2048
_FILTER_WARPS = 8
_FILTER_REGISTERS = 80  # room for three programs on a multiprocessor; unlimited the compiler takes 110
_MIN_TILE = 64
_OWNERS_BLOCK = 256


@on_kernels(accept_ref)
def accept(
    block: DraftBlock,
    windows: Windows,
    target_logits: torch.Tensor,  # [N, V]
    prefix_lens: torch.Tensor,  # [bs] int64
    rows: SamplingBatch,
    keys: RoundKeys,
) -> AcceptResult:
    """Judge the drafts of every request.

    Args:
        block: the proposals; from slot ``verify_lens`` on any token will do. A depth of 0 is a plain decode step. Its
            distribution is read for sampled requests only, and may be missing if all their drafts are copied.
        windows: rows of the requests. A slot of the batch without a request has no rows, or one row of anything; it
            keeps 0 drafts and gets some valid token.
        target_logits: float32, float16 or bfloat16, rows contiguous, not modified. Row indptr[r] + i predicts draft i
            of request r, and row indptr[r] + verify_lens[r] the bonus token.
        prefix_lens: committed tokens of each request before this round.
        rows: sampling parameters of the bs requests.
        keys: noise keys of this round, the same as in drafting; draft i stands at position ``keys.positions + i``. An
            int ``step`` costs a launch and is frozen in a CUDA graph.

    Returns:
        The outcome. No host sync; safe under graph capture if ``rows`` are.

    Raises:
        ValueError: draft and target disagree on the vocabulary or the block.
    """
    launches = _Launches(block, windows, target_logits, rows, keys)
    launches.read_rows()
    if rows.any_filter:
        launches.cut(rows.filter_params)
    if rows.any_seeded:
        launches.draw_seeded(rows.seeds, keys.positions)
    accepted = launches.judge(prefix_lens)
    if not rows.all_greedy:
        launches.draw(accepted)
    return accepted


class _Launches:
    """The launches of one verification, in their order, and the memory between them."""

    def __init__(
        self, block: DraftBlock, windows: Windows, target_logits: torch.Tensor, rows: SamplingBatch, keys: RoundKeys
    ) -> None:
        if target_logits.stride(1) != 1:
            raise ValueError("target_logits must have contiguous rows; pass a [N, V] tensor, not its transpose")
        self._drafts, self._windows, self._logits = block.tokens, windows, target_logits
        if self._drafts.stride(1) != 1:
            self._drafts = self._drafts.contiguous()
        self.bs, self.gamma = self._drafts.shape
        num_rows, vocab_size = target_logits.shape
        self._sampled, self._filtered, self._seeded = not rows.all_greedy, rows.any_filter, rows.any_seeded
        self._tile = _tile(_FINE_TILE if self._filtered or self._seeded else _STATS_TILE, vocab_size)
        tiles = self._num_tiles = triton.cdiv(vocab_size, self._tile)
        self._row_args: dict[str, Any] = {
            "logits_ptr": target_logits,
            "indptr_ptr": windows.indptr,
            "temperatures_ptr": rows.draw_temperatures if self._sampled else None,
            "row_stride": target_logits.stride(0),
            "vocab_size": vocab_size,
        }
        self._tile_args: dict[str, Any] = {
            "tile_max_ptr": self._floats(num_rows, tiles),
            "tile_token_ptr": self._ints(num_rows, tiles),
            "tile_sum_ptr": self._floats(num_rows, tiles) if self._sampled else None,
            "num_tiles": tiles,
        }
        self._cut_args: dict[str, Any] = {
            "cut_ptr": self._floats(num_rows) if self._filtered else None,
            "last_ptr": self._ints(num_rows) if self._filtered else None,
        }
        self._row_log_masses = self._floats(num_rows) if self._filtered else None
        self._seed_args: dict[str, Any] = {
            "is_seeded_ptr": rows.is_seeded.view(torch.uint8) if self._seeded else None,
            "seeded_speed_ptr": self._floats(num_rows, tiles) if self._seeded else None,
            "seeded_token_ptr": self._ints(num_rows, tiles) if self._seeded else None,
        }
        self._draft_args = _draft_args(self._drafts, block, rows, vocab_size)
        self._noise_args: dict[str, Any] = {
            "seed": keys.signed_seed,
            "step_ptr": keys.device_step if self._sampled else None,
            "request_keys_ptr": keys.request_keys if self._sampled else None,
        }
        # Of the row that a sampled request's next token is drawn from.
        self._draw_args: dict[str, Any] = {
            "source_ptr": self._ints(self.bs) if self._sampled else None,
            "base_ptr": self._floats(self.bs) if self._sampled else None,
            "log_mass_ptr": self._floats(self.bs) if self._sampled else None,
        }

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._logits.device)

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._logits.device)

    def read_rows(self) -> None:
        """Compute the statistics of the tiles."""
        row_stats_kernel[len(self._logits), self._num_tiles](
            **self._row_args,
            **self._tile_args,
            bs=self.bs,
            SAMPLED=self._sampled,
            TILE=self._tile,
            BLOCK_B=_OWNERS_BLOCK,
        )

    def cut(self, filters: FilterParams) -> None:
        """Find the cuts of top-k, top-p and min-p in the rows."""
        filter_kernel[self.bs, self.gamma + 1](
            **self._row_args,
            **self._cut_args,
            verify_lens_ptr=self._windows.verify_lens,
            top_ks_ptr=filters.top_ks,
            top_ps_ptr=filters.top_ps,
            min_ps_ptr=filters.min_ps,
            tile_max_ptr=self._tile_args["tile_max_ptr"],
            tile_sum_ptr=self._tile_args["tile_sum_ptr"],
            candidates_ptr=self._floats(len(self._logits), _CANDIDATES),
            log_mass_ptr=self._row_log_masses,
            num_tiles=self._num_tiles,
            gamma=self.gamma,
            TILE=self._tile,
            BLOCK_T=triton.next_power_of_2(self._num_tiles),
            ROOM=_CANDIDATES,
            num_warps=_FILTER_WARPS,
            maxnreg=_FILTER_REGISTERS,
        )

    def draw_seeded(self, seeds: torch.Tensor, positions: torch.Tensor) -> None:
        """Draw the tokens of seeded requests in all their rows."""
        seeded_kernel[self.bs, self.gamma + 1, self._num_tiles](
            **self._row_args,
            **self._cut_args,
            **self._seed_args,
            verify_lens_ptr=self._windows.verify_lens,
            seeds_ptr=seeds,
            positions_ptr=positions,
            tile_max_ptr=self._tile_args["tile_max_ptr"],
            num_tiles=self._num_tiles,
            gamma=self.gamma,
            HAS_FILTER=self._filtered,
            TILE=self._tile,
            BLOCK_T=triton.next_power_of_2(self._num_tiles),
        )

    def judge(self, prefix_lens: torch.Tensor) -> AcceptResult:
        """Return the outcome, except the next tokens of sampled requests."""
        drafts, bs = self._drafts, self.bs
        lens, bonus, new_seq_lens = (drafts.new_empty(bs) for _ in range(3))
        accepted = AcceptResult(lens, bonus, drafts.new_empty(bs, self.gamma + 1), new_seq_lens)
        judge_kernel[(bs,)](
            **self._row_args,
            **self._tile_args,
            **self._draft_args,
            **self._noise_args,
            **self._draw_args,
            **self._cut_args,
            **self._seed_args,
            row_log_mass_ptr=self._row_log_masses,
            verify_lens_ptr=self._windows.verify_lens,
            prefix_lens_ptr=prefix_lens,
            lens_ptr=lens,
            bonus_ptr=bonus,
            out_tokens_ptr=accepted.out_tokens,
            new_seq_lens_ptr=new_seq_lens,
            SAMPLED=self._sampled,
            HAS_FILTER=self._filtered,
            HAS_SEEDS=self._seeded,
            BLOCK_S=triton.next_power_of_2(self.gamma + 1),
            BLOCK_T=triton.next_power_of_2(self._num_tiles),
        )
        return accepted

    def draw(self, accepted: AcceptResult) -> None:
        """Draw the next tokens of sampled requests from the row that the verdict names."""
        vocab_size = self._row_args["vocab_size"]
        tile = _tile(_DRAW_TILE, vocab_size)
        tiles = triton.cdiv(vocab_size, tile)
        shared: dict[str, Any] = {
            **self._row_args,
            **{name: value for name, value in self._draft_args.items() if name != "gamma"},
            **self._draw_args,
            **self._cut_args,
            "lens_ptr": accepted.accept_lens,
            "tile_mass_ptr": self._floats(self.bs, tiles),
            "target_tile_mass_ptr": self._floats(self.bs, tiles),
            "num_tiles": tiles,
            "HAS_FILTER": self._filtered,
            "TILE": tile,
        }
        mass_kernel[self.bs, tiles](**shared)
        token_kernel[(self.bs,)](
            **shared,
            **self._noise_args,
            bonus_ptr=accepted.bonus_tokens,
            out_tokens_ptr=accepted.out_tokens,
            gamma=self.gamma,
            BLOCK_T=triton.next_power_of_2(tiles),
        )


def _draft_args(drafts: torch.Tensor, block: DraftBlock, rows: SamplingBatch, vocab_size: int) -> dict[str, Any]:
    """Return the drafts' tensors that kernels read."""
    gamma = drafts.shape[1]
    distribution = block.distribution if rows.any_sampled and gamma else None
    if distribution is not None:
        distribution.check(drafts, vocab_size)
        if not distribution.scores.is_contiguous():
            raise ValueError("the scores of the distribution of the drafts must be contiguous; call .contiguous()")
    copied = None if distribution is None else block.copied
    return {
        "draft_tokens_ptr": drafts,
        "drafts_stride": drafts.stride(0),
        "gamma": gamma,
        "drawn": 0 if distribution is None else distribution.scores.shape[1],
        "scores_ptr": None if distribution is None else distribution.scores,
        "scores_stride": 0 if distribution is None else distribution.scores.shape[2],
        "log_norms_ptr": None if distribution is None else distribution.log_norms.contiguous(),
        "columns_ptr": None if distribution is None else distribution.columns,
        "copied_ptr": None if copied is None else copied.contiguous().view(torch.uint8),
        "HAS_DISTRIBUTION": distribution is not None,
        "HAS_COLUMNS": distribution is not None and distribution.columns is not None,
        "HAS_COPIED": copied is not None,
    }


def _tile(max_tile: int, vocab_size: int) -> int:
    """Return the number of tokens of a tile."""
    return max(_MIN_TILE, min(max_tile, triton.next_power_of_2(vocab_size)))
