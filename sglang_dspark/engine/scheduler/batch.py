"""Reading SGLang's batches and writing its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dspark_kernels import Accepted, DraftBlock, RoundKeys, SamplingRows
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dspark.engine.scheduler import options as speculation
from sglang_dspark.engine.scheduler.draft_input import DSparkDraftInput
from sglang_dspark.engine.scheduler.last_batch import LastBatch
from sglang_dspark.engine.scheduler.logprobs import with_logprobs
from sglang_dspark.step.state import DecodeBatch, Rounds, VerifyPlan
from sglang_dspark.step.transfers import copy_to_host


class SamplingReader(LastBatch[SamplingRows]):
    """Sampling parameters of a batch, rebuilt only when its requests change."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._rows_of)
        self._device = device

    def _rows_of(self, reqs: Sequence[Any]) -> SamplingRows:
        parameters = [req.sampling_params for req in reqs]
        return SamplingRows.from_lists(
            temperatures=[p.temperature for p in parameters],
            top_ks=[p.top_k for p in parameters],
            top_ps=[p.top_p for p in parameters],
            min_ps=[p.min_p for p in parameters],
            seeds=[p.sampling_seed for p in parameters],
            device=self._device,
        )


def round_keys(batch: Any, positions: torch.Tensor, *, seed: int, step: int) -> RoundKeys:
    """Keys of the random numbers of one step.

    None is used twice: ``step`` never repeats, and a request occupies its ``req_pool_indices`` row alone.

    Args:
        positions: [bs] int64, position of the first token that the step draws.
    """
    return RoundKeys(seed=seed, step=step, request_keys=batch.req_pool_indices.to(torch.int64), positions=positions)


def read_decode_batch(batch: Any, rows: SamplingRows, *, seed: int, step: int, adjusted: bool = False) -> DecodeBatch:
    """The tensors of a decode step out of a ``ScheduleBatch``."""
    prefix_lens = batch.seq_lens.to(torch.int64)
    return DecodeBatch(
        anchors=batch.spec_info.bonus_tokens,
        prefix_lens=prefix_lens,
        req_pool_indices=batch.req_pool_indices.to(torch.int64),
        req_to_token=batch.req_to_token_pool.req_to_token,
        rows=rows,
        keys=round_keys(batch, prefix_lens + 1, seed=seed, step=step),
        adjusted=adjusted,
    )


@dataclass
class DSparkBatchResult(GenerationBatchResult):
    """SGLang's result, with the step's rounds copied to the host beside it."""

    rounds: Rounds | None = None

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Start the copies on SGLang's copy stream; the base class, last, records the event that readers wait for."""
        if self.rounds is not None:
            self.rounds = self.rounds.on_host(copy_to_host)
        super().copy_to_cpu(*args, **kwargs)


def decode_result(
    batch: Any,
    step: DecodeBatch,
    plan: VerifyPlan,
    output: Any,
    accepted: Accepted,
    rounds: Rounds,
    *,
    in_graphs: bool,
) -> DSparkBatchResult:
    """What the scheduler gets of a decode step.

    Args:
        output: SGLang's ``LogitsProcessorOutput`` of the verification.
        in_graphs: whether CUDA graphs were replayed.
    """
    return DSparkBatchResult(
        logits_output=with_logprobs(batch, output, plan.indptr, accepted.out_tokens, step.rows.law.temperatures),
        next_token_ids=accepted.out_tokens.reshape(-1),
        accept_lens=(accepted.accepted_lens + 1).to(torch.int32),
        can_run_cuda_graph=in_graphs,
        next_draft_input=DSparkDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_seq_lens),
        speculative_num_draft_tokens=accepted.out_tokens.shape[1],
        new_seq_lens=accepted.new_seq_lens,
        rounds=rounds,
    )


def is_running(req: Any) -> bool:
    """Whether a step's tokens still reach the request."""
    return not (req.finished() or req.is_retracted)


def copy_drafts(step: DecodeBatch, block: DraftBlock | None) -> torch.Tensor:
    """[bs, 2 + depth] int64 for a trace: context length, anchor and drafts."""
    columns = [step.prefix_lens[:, None], step.anchors[:, None], *([] if block is None else [block.tokens])]
    return torch.cat(columns, dim=1)


def record_traces(reqs: Sequence[Any], rounds: Rounds, committed_lens: Sequence[int]) -> None:
    """Append this step to the trace of every request that asked for one.

    ``customized_info`` lists are parallel to a request's output tokens (SGLang slices them so when it streams): the
    round stands at the first token that it committed, null at the others.

    Args:
        committed_lens: tokens committed per request, bonus included.
    """
    if rounds.traced is None:
        return
    logits = None if rounds.confidence is None else rounds.confidence.logits
    confidences = [None] * len(reqs) if logits is None or logits.isnan().any() else logits.tolist()
    lens = rounds.verify_lens.tolist()
    columns = (rounds.traced.tolist(), rounds.drafted, rounds.copied, confidences, lens, committed_lens)
    for req, (start, anchor, *draft), depth, copied, confidence, verified, committed in zip(
        reqs, *columns, strict=True
    ):
        if not speculation.read(req).trace or not is_running(req):
            continue
        if req.customized_info is None:
            req.customized_info = {}
        trace = req.customized_info.setdefault("dspark_trace", [])
        trace.extend([None] * (len(req.output_ids) - len(trace)))
        trace.append(
            {
                "start": start,
                "anchor": anchor,
                "draft": draft[: copied or depth],
                "copied": copied > 0,
                "confidence": None if confidence is None or copied else confidence[:depth],
                "verified": verified,
                "accepted": committed - 1,
            }
        )
        trace.extend([None] * (committed - 1))
