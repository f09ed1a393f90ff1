"""Reading SGLang's batches and writing its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dspark_kernels import RoundKeys, SamplingRows
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dspark.engine.requests import wants_trace
from sglang_dspark.worker.state import DecodeBatch, Rounds


class SamplingReader:
    """Sampling parameters of a batch, rebuilt only when its requests change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rids: list[str] | None = None
        self._rows: SamplingRows | None = None

    def read(self, reqs: Sequence[Any]) -> SamplingRows:
        """Rows of ``reqs``, in order."""
        rids = [req.rid for req in reqs]
        if self._rows is None or rids != self._rids:
            parameters = [req.sampling_params for req in reqs]
            self._rows = SamplingRows.from_lists(
                temperatures=[p.temperature for p in parameters],
                top_ks=[p.top_k for p in parameters],
                top_ps=[p.top_p for p in parameters],
                min_ps=[p.min_p for p in parameters],
                seeds=[p.sampling_seed for p in parameters],
                device=self._device,
            )
            self._rids = rids
        return self._rows


def read_decode_batch(batch: Any, rows: SamplingRows, *, seed: int, step: int, gamma: int) -> DecodeBatch:
    """The tensors of a decode step out of a ``ScheduleBatch``.

    No key of the step's random numbers is used twice: ``step`` never repeats, and a request occupies its
    ``req_pool_indices`` row alone.
    """
    prefix_lens = batch.seq_lens.to(torch.int64)
    req_pool_indices = batch.req_pool_indices.to(torch.int64)
    offsets = torch.arange(gamma + 1, device=prefix_lens.device)
    positions = prefix_lens[:, None] + offsets
    slots = batch.req_to_token_pool.req_to_token[req_pool_indices[:, None], positions]
    return DecodeBatch(
        anchors=batch.spec_info.bonus_tokens,
        prefix_lens=prefix_lens,
        req_pool_indices=req_pool_indices,
        window_slots=slots.to(torch.int64),
        window_positions=positions,
        rows=rows,
        keys=RoundKeys(seed=seed, step=step, request_keys=req_pool_indices, positions=prefix_lens + 1),
    )


@dataclass
class DSparkBatchResult(GenerationBatchResult):
    """SGLang's result, with the step's rounds copied to the host beside it."""

    rounds: Rounds | None = None

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Start the copies; called on SGLang's copy stream, waited for before the result is processed."""
        super().copy_to_cpu(*args, **kwargs)
        if self.rounds is not None:
            drafted = self.rounds.draft_tokens
            self.rounds = Rounds(
                draft_tokens=None if drafted is None else drafted.to("cpu", non_blocking=True),
                verify_lens=self.rounds.verify_lens.to("cpu", non_blocking=True),
                prefix_lens=self.rounds.prefix_lens.to("cpu", non_blocking=True),
                anchors=self.rounds.anchors.to("cpu", non_blocking=True),
            )


def record_traces(reqs: Sequence[Any], rounds: Rounds, accept_lens: Sequence[int]) -> None:
    """Append this step to the trace of every request that asked for one.

    ``customized_info`` lists are parallel to a request's output tokens (SGLang slices them so when it streams): the
    round stands at the first token that it committed, null at the others.

    Args:
        accept_lens: tokens committed per request, bonus included.
    """
    for index, req in enumerate(reqs):
        if not wants_trace(req) or req.finished() or req.is_retracted:
            continue
        if req.customized_info is None:
            req.customized_info = {}
        trace = req.customized_info.setdefault("dspark_trace", [])
        trace.extend([None] * (len(req.output_ids) - len(trace)))
        trace.append(
            {
                "start": int(rounds.prefix_lens[index]),
                "anchor": int(rounds.anchors[index]),
                "draft": [] if rounds.draft_tokens is None else rounds.draft_tokens[index].tolist(),
                "verified": int(rounds.verify_lens[index]),
                "accepted": accept_lens[index] - 1,
            }
        )
        trace.extend([None] * (accept_lens[index] - 1))
