"""Says what a feature does in the scheduler of a server that uses it, and when the worker asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from dspark_kernels import ChainRules

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.model import DraftCache
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.server import DSparkServer
from sglang_dspark.engine.sglang_types import (
    ForwardBatch,
    GenerationBatchResult,
    ModelRunner,
    Req,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
)
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import DecodeBatch, VerifyPlan

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang_dspark.engine.agreement import Agreement
    from sglang_dspark.engine.batch import DSparkBatchResult
    from sglang_dspark.scheduling.schedule import Schedule


class Worker(Protocol):
    """Our worker, as far as parts know it.

    Attributes:
        drafter: with a network or without.
        max_verify: drafts that a step may verify per request.
        draft_pool: the draft K/V as SGLang's kind of pool, where a feature copies it along.
    """

    server_args: ServerArgs
    options: DSparkConfig
    settled: DSparkServer
    target_worker: TpModelWorker
    model_runner: ModelRunner
    agreement: Agreement
    drafter: Any
    schedule: Schedule
    device: torch.device
    max_verify: int
    draft_pool: KVCache | None

    def set_hicache_consumer(self, index: int) -> None:
        """Have the next forward wait for a load from host memory, layer by layer; for none if the index is -1."""


class DrawnTokens(NamedTuple):
    """Tokens whose logits are still as they were when the tokens were drawn.

    Attributes:
        indptr: [at least bs + 1] int64, first row of each request; its token i was drawn from its row i.
        tokens: [bs] int64 of prompts; [bs, w] of a decode step, with -1 after them.
        temperatures: [bs] float32, 1 of greedy requests.
    """

    indptr: torch.Tensor
    tokens: torch.Tensor
    temperatures: torch.Tensor


class Counted(NamedTuple):
    """Numbers that only grow, by kind, for statistics; with a label for their kinds also for Prometheus."""

    name: str
    values: Mapping[str, float]
    label: str = ""
    text: str = ""


class CapturedPart(Protocol):
    """A feature's part of verifications that CUDA graphs replay."""

    def prepare(self, plan: VerifyPlan, forward_batch: ForwardBatch) -> None:
        """Launch what comes before a captured forward of the target, on buffers that stay there. No host sync."""

    def stage(self, batch: ScheduleBatch | None) -> None:
        """Write what the next replay reads of SGLang's batch; of None in a step that is measured, without requests."""


class Part:
    """A feature's part in a server's scheduler. Every method here does nothing: override the moments that matter."""

    @classmethod
    def of(cls, worker: Worker) -> Part | None:
        """Return the part of our worker, whose target has been loaded; None if the target has no use for it."""
        return cls()

    @property
    def timed(self) -> Mapping[str, str]:
        """Return the properties of the server that its step times depend on, by name."""
        return {}

    def pools_made(self, allocator: BaseTokenToKVPoolAllocator, cache: DraftCache | None) -> None:
        """Look at the memory, before any backend of attention exists.

        Args:
            allocator: SGLang's, of K/V slots.
            cache: the drafter's K/V, with a row for each slot; None without a drafter.
        """

    def attention_made(self) -> None:
        """Look at the target's runner, whose attention is complete, before any graph is captured."""

    def captured(self, requests: int, rows: int) -> CapturedPart | None:
        """Return the feature's part of captured verifications; None if it has none.

        Args:
            requests: slots of the largest captured step.
            rows: of the largest captured verification.
        """
        return None

    def ready(self) -> None:
        """Look at what decodes, before the first request comes."""

    def batch_comes(self, batch: ScheduleBatch) -> None:
        """Prepare for SGLang's batch, a prefill or a decode step."""

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        """Prepare for SGLang's batch, whose prompts are about to be encoded. No host sync.

        Requests that already run may come after those with prompts, and get their next token as these get their first:
        :func:`~.batch.prompts_of` tells them apart.
        """

    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Look at SGLang's batch, whose prompts have their K/V. No host sync."""

    def tokens_drawn(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        """Return SGLang's ``LogitsProcessorOutput`` with what requests ask to know of their new tokens.

        Args:
            output: what the tokens were drawn from. Leave it as it is: a captured graph may own it.
        """
        return output

    def step_launched(self, plan: VerifyPlan, result: GenerationBatchResult) -> None:
        """Look at a decode step, before its result is copied to the host and its rows are overwritten. No host sync."""

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        """Look at a decode step's tokens on the host, by request, before SGLang appends them."""

    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Look at the outcome of a decode step, before SGLang appends its tokens to their requests.

        Args:
            record: of the step; its tensors are on the host.
            running: requests of the step that its tokens are for: places of those that have not ended.
            accepted: drafts accepted, of each of these.
        """

    def request_ended(self, req: Req) -> None:
        """Look at SGLang's request, whose text is complete."""

    def weights_changed(self) -> None:
        """Drop what was learned of the weights before: others are in force, or may be."""

    def report(self) -> Mapping[str, object]:
        """Return what the feature adds to the statistics, as JSON."""
        return {}

    def counted(self) -> Sequence[Counted]:
        """Return what the feature has counted; always the same kinds. Called from other threads too."""
        return ()

    def describe(self) -> Mapping[str, object]:
        """Return what ``GET /dspark/capabilities`` says of the feature on this server, by key."""
        return {}


class StepPart:
    """A part of one decode step, around its logits. The methods do nothing, and are called in this order."""

    def before_verify(self, plan: VerifyPlan) -> None:
        """Read the rows, before the target's forward is launched: the host may wait here and nowhere else."""

    def after_verify(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        """Change the logits [N, V] of the rows, in place. No host sync."""

    def accepted(self, tokens: torch.Tensor) -> None:
        """Look at the new output tokens [bs, w] int64, -1 after them. No host sync."""


class LogitsPart(Part):
    """A part of the core that changes logits, or reads them."""

    def warm_up(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        """Launch the kernels of a step on logits [N, V] of requests that do not exist: real ones shall compile none."""

    def held(self, requests: int) -> AbstractContextManager[object]:
        """Hold what memory the feature takes while the largest step runs, of so many requests."""
        return nullcontext()

    def first_logits(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        """Change the logits [bs, V], in place, that the first tokens of SGLang's batch of prompts are drawn from."""

    def first_tokens(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        """Look at the first tokens [bs] int64 of SGLang's batch of prompts. No host sync."""

    def step_comes(self, batch: ScheduleBatch) -> StepPart | None:
        """Return the feature's part of the decode step ahead; None if it leaves the logits alone."""
        return None


class Encoded(NamedTuple):
    """Prompts that the target has read.

    Attributes:
        result: SGLang's, with logits [bs, V] after each and the tapped states of all rows.
        input_ids, positions: [n] int64 of the rows.
    """

    result: GenerationBatchResult
    input_ids: torch.Tensor
    positions: torch.Tensor


class Encoder(Part, ABC):
    """A part that may run the target over prompts in SGLang's place; a server has one at most."""

    @abstractmethod
    def encode(self, batch: ScheduleBatch) -> Encoded | None:
        """Run the target over the prompts of SGLang's batch; None leaves that to SGLang. No host sync."""


class Weigher(Part, ABC):
    """A part that says which requests' drafts count most; a server has one at most."""

    @abstractmethod
    def weights(self, batch: ScheduleBatch) -> Sequence[float] | None:
        """Return what a draft of each request of SGLang's batch counts, above 0; None if all count alike.

        It may depend on what requests ask for, on the clock and on tokens that they have been sent. No host sync.
        """


class RulesBuffers(Protocol):
    """The rules of captured searches for candidates, in buffers that stay where they are."""

    def stage(self, step: DecodeBatch) -> None:
        """Copy the rules of a step. No host sync."""

    def first(self, slots: int) -> ChainRules:
        """Return the staged rules of so many requests."""


class CandidateSource(Part, ABC):
    """A part that finds candidates, which compete with the drafter's tokens or are drafted in their place."""

    @abstractmethod
    def buffers(self, slots: int) -> RulesBuffers:
        """Return the rules of captured steps of up to so many requests."""

    @abstractmethod
    def rules(self, batch: ScheduleBatch) -> ChainRules | None:
        """Return what SGLang's batch asks for in the step ahead; None if no request asks for anything."""

    @abstractmethod
    def names_drafts(self, req: Req) -> bool:
        """Return whether SGLang's request has asked for candidates in place of a drafter's tokens."""

    @abstractmethod
    def find(self, step: DecodeBatch, slot_tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Return [bs, 2 + number] int64 chains of :class:`dspark_kernels.Candidates`.

        No host sync; CUDA graphs capture it.

        Args:
            slot_tokens: [slots] int64, the token whose K/V each slot holds; negative where none has one.
            number: of candidates for each request.
        """

    @abstractmethod
    def flushed(self) -> None:
        """Drop what earlier requests have left: an operator has SGLang drop its prefixes."""


K = TypeVar("K", bound=Part)


def part_of(parts: Sequence[Part], kind: type[K]) -> K | None:
    """Return the part of a kind; None if no feature of the server has one."""
    return next((part for part in parts if isinstance(part, kind)), None)


def parts_of(worker: Any, args: ServerArgs, *, ours: bool = True) -> Sequence[Part]:
    """Return the parts of the features that a server uses; its target has been loaded.

    Args:
        worker: ours, or what drives another one.
        ours: which of these it is.

    Raises:
        UnservedError, ConfigError: the server or its target cannot be served with a feature.
    """
    used = [feature for feature in all_features() if (ours or feature.of_any_worker) and feature.is_used(args)]
    found = [feature.part(worker) for feature in used]
    return [part for part in found if part is not None]
