"""Rows of a verification in which all requests have as many: its width.

SGLang's own worker has one width, and one set of graphs and of attention metadata for it. A server has a few: for each,
another attention backend, graphs, and an executor, as SGLang's adaptive EAGLE has for each number of its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from dspark_kernels import StepRequests
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow, alloc_verify_window
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.sglang_types import ModelRunner, ScheduleBatch
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import SelectedDrafts

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

logger = logging.getLogger(__name__)

_SPARE_GB = 1.0  # with less free memory SGLang captures no graphs of a drafter either


class NarrowVerify(TargetVerifyExecutor):
    """Verifies fewer rows per request than the worker has reserved slots for, its first ones."""

    def __init__(self, worker: DSparkWorkerV2, rows: int) -> None:
        super().__init__(
            target_worker=worker.target_worker,
            gamma=rows - 1,
            verify_num_draft_tokens=rows,
            model_runner=worker.model_runner,
            kv_injector=worker._kv_injector,
            tp_sync=worker._tp_sync,
            block_verification=get_spec().speculative_use_block_verification,
            rejection_noise=worker._rejection_noise,
        )
        self._offsets = worker._block_pos_offsets[:rows]
        self._window: VerifyWindow | None = None

    def run_non_compact(self, *, batch: ScheduleBatch, draft_input: Any, verify_window: Any, **given: object) -> Any:
        """Run the forward; the drafter's window is wider."""
        lens = draft_input.nxt_kv_lens_cpu if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        self._window = alloc_verify_window(
            batch=batch,
            bs=len(batch.seq_lens),
            device=self.model_runner.device,
            verify_num_draft_tokens=self.verify_num_draft_tokens,
            block_pos_offsets=self._offsets,
            model_runner=self.model_runner,
            seq_lens_cpu=lens,
        )
        return super().run_non_compact(batch=batch, draft_input=draft_input, verify_window=self._window, **given)

    def commit_hidden(self, *, verify_window: Any, **given: object) -> None:
        """Write the draft K/V of the rows that were accepted."""
        super().commit_hidden(verify_window=self._window, **given)


@dataclass(frozen=True)
class Width:
    """All that the worker verifies so many rows of each request with."""

    rows: int
    executor: Any
    attention: Any
    graphs: Any

    @classmethod
    def of(cls, worker: DSparkWorkerV2) -> Width:
        """Return the worker's own."""
        runner = worker.model_runner
        own = worker._verify_executor, runner.attn_backend, runner.decode_cuda_graph_runner
        return cls(worker.verify_num_draft_tokens, *own)

    def narrowed(self, worker: DSparkWorkerV2, rows: int) -> Width:
        """Return a narrower one, captured where this one is."""
        runner, graphs = worker.model_runner, None
        with _sized(runner, rows):
            attention = runner._get_attention_backend(init_new_workspace=True)
            if self.graphs is not None:
                graphs = type(self.graphs)(runner, attn_backend=attention, speculative_num_draft_tokens=rows)
        return replace(self, rows=rows, executor=NarrowVerify(worker, rows), attention=attention, graphs=graphs)

    def apply(self, worker: DSparkWorkerV2) -> None:
        """Have the worker verify so many rows from now on."""
        worker.verify_num_draft_tokens, worker._verify_executor = self.rows, self.executor
        worker.model_runner.attn_backend = self.attention
        worker.model_runner.decode_cuda_graph_runner = self.graphs


@contextmanager
def _sized(runner: ModelRunner, rows: int) -> Iterator[None]:
    """Let SGLang size for so many rows of each request what is made inside the block."""
    whole, made_new = get_spec().speculative_num_draft_tokens, runner.init_new_workspace
    hooks, runner.capture_tail_hooks = runner.capture_tail_hooks, []  # of the worker's own width
    get_context().override("sglang-dspark", speculative_num_draft_tokens=rows)
    try:
        yield
    finally:
        get_context().override("sglang-dspark", speculative_num_draft_tokens=whole)
        runner.init_new_workspace, runner.capture_tail_hooks = made_new, hooks


class Widths:
    """The widths of a server, of which one is taken for each step.

    What a request may not verify is computed with the rest and not accepted: its tokens are cut where they would be if
    it had not been.

    Args:
        worker: SGLang's, ready to serve with its own width.
        agreement: of the server's ranks.
        narrow: whether there are others beside the worker's own.

    Attributes:
        window: the widest, which is the worker's own.
        tiers: none: rows are known by requests and width.
        lengths: drafts per request that a step may verify, ascending, without the plain step.
        memory_gb: what the narrower ones take of the GPU.
    """

    tiers: Sequence[int] = ()

    def __init__(self, worker: DSparkWorkerV2, agreement: Agreement, *, narrow: bool) -> None:
        self._worker, self._agreement = worker, agreement
        own, free = Width.of(worker), self._free_gb()
        self.window = own.rows
        self._widths = [*(self._narrower(own) if narrow else ()), own]
        self._taken, self._cut = own, False
        self.lengths = tuple(width.rows - 1 for width in self._widths if width.rows > 1)
        self.memory_gb = max(0.0, free - self._free_gb()) if own.graphs is not None else 0.0
        rows = ", ".join(str(width.rows) for width in self._widths)
        logger.info("DSPARK: steps verify %s rows of each request; narrow ones take %.2f GB", rows, self.memory_gb)

    def _narrower(self, own: Width) -> Iterator[Width]:
        """Yield the widths beside the worker's own, ascending."""
        for rows in narrower_widths(own.rows):
            if own.graphs is not None and self._free_gb() < _SPARE_GB:
                logger.warning(
                    "DSPARK: no memory is left to capture steps of %d or more rows per request, except for whole "
                    "blocks; pass a smaller --mem-fraction-static",
                    rows,
                )
                return
            yield own.narrowed(self._worker, rows)

    def _free_gb(self) -> float:
        worker, group = self._worker, get_parallel().tp_group
        return float(
            get_available_gpu_memory(
                worker.device, worker.gpu_id, distributed=self._agreement.needed, cpu_group=group.cpu_group
            )
        )

    @property
    def digest(self) -> str:
        """Return what step times depend on."""
        graphs = self._widths[-1].graphs
        widths, batches = [width.rows for width in self._widths], [] if graphs is None else list(graphs.capture_bs)
        return f"widths {widths} of {batches} requests"

    def fit(self, requests: int) -> bool:
        """Return True: any width serves any number of requests, beyond the captured ones without a graph."""
        return True

    def take(self, proposal: Any, decision: StepDecision, requests: int) -> Any:
        """Take the width that a step needs, and return its proposal: the first drafts of each block."""
        longest = decision.longest(requests)
        self._taken = width = next(width for width in self._widths if width.rows > longest)
        self._cut = not decision.is_fixed(requests) or decision.draft_len + 1 < width.rows
        width.apply(self._worker)
        if width.rows < self.window:
            proposal = msgspec.structs.replace(proposal, draft_block=_first(proposal.draft_block, width.rows - 1))
        elif not self._cut:
            return proposal
        # What a graph of the whole width accepts is neither cut nor narrow.
        return msgspec.structs.replace(proposal, folded=False, verify_ids=None)

    def lay_out(
        self, selected: SelectedDrafts, tokens: torch.Tensor, requests: StepRequests, total: int | None
    ) -> tuple[RaggedVerifyLayout | None, torch.Tensor, int]:
        """Return where ``selected`` cuts what is accepted, if it does, the drafts verified, and the rows computed."""
        lens, rows = selected.verify_lens, len(requests) * self._taken.rows
        if not self._cut:
            return None, lens, rows
        return RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens + 1, graph_num_tokens=rows), lens, rows

    def release(self) -> None:
        """Let the worker have its own width again: prefills are computed by its backend."""
        self._widths[-1].apply(self._worker)


def _first(block: Any, drafts: int) -> Any:
    """Return the first ``drafts`` drafts of every block."""
    logits = block.corrected_logits
    return msgspec.structs.replace(
        block,
        draft_tokens=block.draft_tokens[:, :drafts].contiguous(),
        corrected_logits=None if logits is None else logits[:, :drafts].contiguous(),
        greedy_draft=block.greedy_draft or not drafts,  # SGLang divides by their number otherwise
    )


def narrower_widths(window: int) -> list[int]:
    """Return the widths beside ``window``, ascending from the plain step's: each verifies half the drafts of the next.

    So a step verifies at most twice the drafts that it would with all widths, and there are few.
    """
    drafts, widths = window - 1, []
    while drafts:
        drafts //= 2
        widths.append(drafts + 1)
    return widths[::-1]
