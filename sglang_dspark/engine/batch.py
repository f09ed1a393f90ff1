"""Read SGLang's batches and write its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from dspark_kernels import ChainRules, DraftBlock, RoundKeys, SamplingBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch as Batch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.request_options import carry_counts
from sglang_dspark.engine.sglang_types import ModelRunner, Req, ScheduleBatch
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.packed import AwaitedEvent, DeviceSpan, Packed, PackedCopies
from sglang_dspark.step.state import DecodeBatch, StepOutcome

T = TypeVar("T")


class CachedByBatch(Generic[T]):
    """A value made from a batch's requests, and made again only when these change.

    Args:
        make: from the requests, in order.

    Attributes:
        changed: whether the last read was of other requests than the one before.
    """

    changed = True

    def __init__(self, make: Callable[[Sequence[Req]], T]) -> None:
        self._make = make
        # The objects, not their ids: a client may use a request id again with other parameters.
        self._last: tuple[list[Req], T] | None = None

    def read(self, reqs: Sequence[Req]) -> T:
        """Return the value of ``reqs``."""
        if self._last is not None:
            last, value = self._last
            if len(reqs) == len(last) and all(map(is_, reqs, last)):
                self.changed = False
                return value
        self.changed = True
        value = self._make(reqs)
        self._last = list(reqs), value
        return value

    def forget(self) -> None:
        """Make the value again: something that it is made of, other than the requests, has changed."""
        self._last = None


DECODED_WITH_PREFILL = "dspark_decoded_with_prefill"
"""Attribute of a batch of prompts that names the requests next to it in the same step, if these are not in the batch.

It has their number as its length, and in ``drafted`` whether their drafts took a part of the step's time.
"""


class SamplingReader(CachedByBatch[SamplingBatch]):
    """Read the sampling parameters of a batch, again only when its requests change."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._rows_of)
        self._device = device
        self._greedy: dict[int, SamplingBatch] = {}  # by size: greedy requests are all alike

    def _rows_of(self, reqs: Sequence[Req]) -> SamplingBatch:
        parameters = [req.sampling_params for req in reqs]
        if all(p.top_k == 1 for p in parameters):  # what SGLang makes of temperature 0
            if len(reqs) not in self._greedy:
                self._greedy[len(reqs)] = SamplingBatch.by_temperature(len(reqs), None, self._device)
            return self._greedy[len(reqs)]
        return SamplingBatch.from_lists(
            temperatures=[p.temperature for p in parameters],
            top_ks=[p.top_k for p in parameters],
            top_ps=[p.top_p for p in parameters],
            min_ps=[p.min_p for p in parameters],
            seeds=[p.sampling_seed for p in parameters],
            device=self._device,
        )


def round_keys(batch: ScheduleBatch, positions: torch.Tensor, *, seed: int, step: int) -> RoundKeys:
    """Return the keys of the random numbers of one step.

    None is used twice: ``step`` never repeats, and a request occupies its ``req_pool_indices`` row alone.

    Args:
        positions: [bs] int64, position of the first token that the step draws; read only of requests with a seed.
    """
    return RoundKeys(seed=seed, step=step, request_keys=batch.req_pool_indices.to(torch.int64), positions=positions)


def read_decode_batch(
    batch: ScheduleBatch,
    rows: SamplingBatch,
    *,
    seed: int,
    step: int,
    rows_of: Callable[[Sequence[int]], SamplingBatch] | None = None,
    adjusted: bool = False,
    rules: ChainRules | None = None,
) -> DecodeBatch:
    """Read the tensors of a decode step out of a ``ScheduleBatch``.

    Args:
        rows: sampling parameters of all requests.
        rows_of: returns those of some, by their indices; None if steps draft for all.
        adjusted: whether its logits are.
        rules: as in :class:`DecodeBatch`.
    """
    prefix_lens = batch.seq_lens.to(torch.int64)
    return DecodeBatch(
        anchors=batch.spec_info.bonus_tokens,
        prefix_lens=prefix_lens,
        req_pool_indices=batch.req_pool_indices.to(torch.int64),
        req_to_token=batch.req_to_token_pool.req_to_token,
        rows=rows,
        batch=batch,
        rows_of=rows_of,
        # Positions matter to requests with a seed: the others spare the device an addition.
        keys=round_keys(batch, prefix_lens + 1 if rows.any_seeded else prefix_lens, seed=seed, step=step),
        rules=rules,
        keeps_logits=adjusted or batch.return_logprob or batch.return_hidden_states,
    )


def decode_batch(
    runner: ModelRunner, reqs: Sequence[Req], rows: torch.Tensor, lens: torch.Tensor, lens_on_host: Sequence[int]
) -> ScheduleBatch:
    """Return a ``ScheduleBatch`` that a verification can run on, and that SGLang's scheduler knows nothing of.

    Args:
        reqs: of its requests, as far as anything reads them.
        rows: [bs] int64 rows of ``req_to_token``.
        lens, lens_on_host: [bs] tokens whose K/V is there.
    """
    batch: ScheduleBatch = Batch(
        reqs=list(reqs),
        req_to_token_pool=runner.req_to_token_pool,
        model_config=runner.model_config,
        device=runner.device,
        spec_algorithm=runner.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu = rows, lens, torch.tensor(lens_on_host)
    batch.orig_seq_lens = lens.to(torch.int32)
    batch.seq_lens_sum = sum(lens_on_host)
    return batch


@dataclass
class DSparkBatchResult(GenerationBatchResult):
    """Carry the outcome of a step to the host, with one copy.

    Attributes:
        record: what the step did; its tensors are on the host after :meth:`read_copy`.
        pending: tokens [bs * width], accepted lengths [bs], and the record's tensors.
        span: around everything that the step has launched.
        copy_done: SGLang's event, which it waits for.
    """

    record: StepRecord | None = None
    pending: Packed | None = None
    span: DeviceSpan | None = None
    copy_done: AwaitedEvent | None = None
    _copied: Packed | None = None

    def copy_to_cpu(self, *args: object, **kwargs: object) -> None:
        """Start the copies on SGLang's copy stream; the base class, last, records the event that readers wait for."""
        if self.pending is not None:
            self._copied = self.pending.copy()
            # The base class would copy the device's; what is on the host it leaves alone.
            self.next_token_ids = self._copied.flat
        super().copy_to_cpu(*args, **kwargs)
        self.copy_done = AwaitedEvent(self.copy_done)

    @property
    def times_ms(self) -> tuple[float, float] | None:
        """Return the step's milliseconds on the device, and those that the host has waited for it; None if unknown."""
        device_ms = None if self.span is None else self.span.ms
        if device_ms is None or not isinstance(self.copy_done, AwaitedEvent):
            return None
        return device_ms, self.copy_done.waited_ms

    def read_copy(self) -> None:
        """Give SGLang its tokens, and the record its tensors, in memory of their own; once the copy is done."""
        if self._copied is None:
            return
        assert self.record is not None, "a step has a record"
        packed, self._copied = self._copied, None
        self.unpack(self.record, packed.take())

    def unpack(self, record: StepRecord, tensors: Sequence[torch.Tensor]) -> None:
        """Put what was packed where it belongs."""
        self.next_token_ids, accept_lens, *rest = tensors
        self.accept_lens = accept_lens + 1  # SGLang counts the bonus token too
        self.record = record.of(rest, self.next_token_ids.view(len(accept_lens), -1))
        carry_counts(self, self.record.verify_lens, self.record.from_drafter)


def decode_result(
    outcome: StepOutcome,
    output: LogitsProcessorOutput,
    record: StepRecord,
    copies: PackedCopies,
    span: DeviceSpan,
    *,
    in_graphs: bool,
) -> DSparkBatchResult:
    """Return the scheduler's result of a decode step.

    Args:
        outcome: its anchors and lengths go to SGLang as they are: without a relay, in memory that stays theirs.
        output: SGLang's, with what requests ask to know of their tokens.
        copies: how the rest comes to the host, which reads nothing that a graph wrote after the next step's replays.
        span: around everything that the step launches, this result included.
        in_graphs: whether CUDA graphs were replayed.
    """
    accepted = outcome.accepted
    tokens = accepted.out_tokens.reshape(-1)
    return DSparkBatchResult(
        logits_output=output,
        next_token_ids=tokens,
        can_run_cuda_graph=in_graphs,
        next_draft_input=DSparkDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_seq_lens),
        speculative_num_draft_tokens=accepted.out_tokens.shape[1],
        new_seq_lens=accepted.new_seq_lens,
        record=record,
        span=span,
        pending=copies.pack([tokens, accepted.accept_lens, *record.tensors]),
    )


def most_words(requests: int, max_verify: int, gamma: int) -> int:
    """Return the most words of 32 bits that :func:`decode_result` packs for so many requests."""
    # By request, in 64 bits: tokens with a bonus, what is accepted and what is verified; a trace of context, anchor and
    # drafts; a chain of candidates. In 32: logits and survivals.
    window = max_verify + 1
    return requests * (2 * (window + 2) + 2 * (window + 1) + 2 * (window + 2) + 2 * gamma)


def prompts_of(batch: ScheduleBatch) -> Sequence[Req]:
    """Return the requests whose prompts a prefill encodes; others, which get a token in the same step, follow these.

    Of the others the host does not know the last tokens under overlap.
    """
    return batch.reqs[: len(batch.reqs) - len(batch.decoding_reqs or ())]


def is_running(req: Req) -> bool:
    """Return whether a step's tokens still reach the request."""
    return not (req.finished() or req.is_retracted)


def per_token(req: Req, name: str) -> list[Any]:
    """Return a list of ``customized_info``, which SGLang takes to be parallel to the request's output tokens."""
    if req.customized_info is None:
        req.customized_info = {}
    return req.customized_info.setdefault(name, [])


def copy_drafts(step: DecodeBatch, block: DraftBlock) -> torch.Tensor:
    """Return [bs, 2 + depth] int64 for a trace: context length, anchor and drafts."""
    return torch.cat([step.prefix_lens[:, None], step.anchors[:, None], block.tokens], dim=1)
