"""How long the stages of a server take, measured on requests that do not exist."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from dspark_kernels import DraftBlock, SamplingBatch

from sglang_dspark.engine.scheduler.batch import read_decode_batch
from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch
from sglang_dspark.scheduling.sps_profiler import measure
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import Drafted
from sglang_dspark.worker.staging import Staging

logger = logging.getLogger(__name__)

LIMIT_S = {"cpu": 60.0, "cuda": 20.0}
_CONTEXTS = (64, 1024)  # tokens per request, where pool and context limit have room for them
_MAX_REQUESTS = 256


def measure_steps(staging: Staging, target_worker: Any, max_verify: int, key: dict[str, str]) -> SpsTable:
    """Measure a table.

    Args:
        staging: what takes the steps of the server.
        target_worker: SGLang's worker of the target.
        max_verify: most drafts that a step verifies per request.
        key: what the table is valid for.
    """
    runner, agreement = target_worker.model_runner, staging.eager.agreement
    device = torch.device(target_worker.device).type
    window, graphs = max_verify + 1, staging.graphs
    room = min(runner.model_config.context_len, runner.token_to_kv_pool.size) - window
    contexts = sorted({max(1, min(context, room)) for context in _CONTEXTS})
    logger.info("DSPARK: measuring step times (at most about %.0f s; kept for the next start)", LIMIT_S[device])

    def progress(done: int, most: int, seconds: float) -> None:
        logger.info("DSPARK: measuring step times, pass %d of at most %d, %.1f s", done, most, seconds)

    with ExitStack() as batches, torch.no_grad():
        loads: dict[tuple[int, int], MeasuredSteps] = {}

        def load(requests: int, context: int) -> MeasuredSteps:
            batches.close()  # the rows of the load before
            dummy = batches.enter_context(DummyBatch(target_worker, requests, context, window))
            if (requests, context) not in loads:
                loads[requests, context] = MeasuredSteps(staging, dummy, max_verify)
            return loads[requests, context]

        # What the first forwards compile (SGLang's parallel embedding) must not eat up the limit: it can take longer
        # than all the rest. One token and several are compiled apart. Kernels on a GPU were compiled by the warm-up.
        first = load(1, contexts[0])
        for drafts in (0, max_verify):
            first.verify(drafts)
            first.wait()
        return measure(
            load,
            key=key,
            requests=geometric_grid(most_requests(runner)),
            drafts=range(max_verify + 1),
            contexts=contexts,
            limit_s=LIMIT_S[device],
            tiers=() if graphs is None else graphs.tiers.timed,
            monotone=device == "cpu",
            progress=progress,
            clock=lambda: agreement.share(time.perf_counter()),
        )


def most_requests(runner: Any) -> int:
    """Requests of the largest step that is measured. SGLang derives what it admits from the memory that is free."""
    return min(most_running(runner), _MAX_REQUESTS)


def most_running(runner: Any) -> int:
    """Requests that may run at a time."""
    return min(int(runner.max_running_requests), int(runner.req_to_token_pool.size))


class MeasuredSteps:
    """The stages of a decode step on a dummy batch of greedy requests.

    Attributes:
        queues: whether calls may return before the device has finished.
        wait: returns when it has.
    """

    def __init__(self, staging: Staging, dummy: DummyBatch, max_verify: int) -> None:
        self._staging, self._dummy = staging, dummy
        batch = dummy.fresh()
        bs, device = len(batch.seq_lens), batch.seq_lens.device
        self.queues = device.type == "cuda"
        self.wait: Callable[[], None] = torch.cuda.synchronize if self.queues else lambda: None
        rows = SamplingBatch.from_lists([0.0] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs, device)
        self._step = read_decode_batch(batch, rows, seed=0, step=0)
        tokens = dummy.tokens(max_verify + 1)
        # Contiguous: ranks adopt each other's drafts in place.
        self._tokens = [tokens[:, 1 : depth + 1].contiguous() for depth in range(max_verify + 1)]

    def draft(self, depth: int) -> None:
        """Draft blocks of so many drafts, in a graph where a step of so many requests is served from one."""
        # A budget of 0: with all drafts verified, a step may be too large for the graphs that other budgets fit into.
        decision = StepDecision(depth, TopK(0))
        self._staging.of(self._step, decision).draft(self._step, decision)

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        step, decision = self._step, StepDecision(drafts, FixedLength())
        drafted = Drafted(DraftBlock(self._tokens[drafts]), None, [drafts] * len(step))
        stages = self._staging.of(step, decision)
        plan = stages.plan(step, drafted, decision)
        # Graphs have staged the step already, and need no batch: making one would count as time of the step.
        batch = None if stages.in_graphs else self._dummy.fresh()
        output = stages.verify(batch, step, plan)
        accepted = stages.accept(step, drafted, plan, output)
        stages.commit(plan, accepted, output)
