"""Measures how long the steps of a server take, on requests that do not exist."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from dspark_kernels import DraftBlock, SamplingBatch

from sglang_dspark.engine.scheduler.batch import read_decode_batch
from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch
from sglang_dspark.scheduling.sps_profiler import measure
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import DraftOutput, StepHooks
from sglang_dspark.worker.executors.selector import ExecutorSelector

logger = logging.getLogger(__name__)

LIMIT_S = {"cpu": 60.0, "cuda": 20.0}
CHECK_LIMIT_S = {"cpu": 3.0, "cuda": 1.0}
_CHECKED_REQUESTS = (1, 8)
_CONTEXTS = (64, 1024)  # tokens per request, where pool and context limit have room for them
_MAX_REQUESTS = 256


def measure_steps(
    executors: ExecutorSelector, target_worker: Any, max_verify: int, key: dict[str, str], check: SpsTable | None = None
) -> SpsTable:
    """Measure a table.

    Args:
        executors: of the server.
        target_worker: SGLang's worker of the target.
        max_verify: most drafts that a step verifies per request.
        key: what the table is valid for.
        check: an earlier table, for which only some of its steps are measured.
    """
    runner, agreement = target_worker.model_runner, executors.eager.agreement
    device = torch.device(target_worker.device).type
    window, captured = max_verify + 1, executors.captured
    room = min(runner.model_config.context_len, runner.token_to_kv_pool.size) - window
    contexts = sorted({max(1, min(context, room)) for context in _CONTEXTS})
    requests, limit_s = geometric_grid(most_requests(runner)), LIMIT_S[device]
    if check is not None:
        contexts, limit_s = contexts[:1], CHECK_LIMIT_S[device]
        requests = [count for count in _CHECKED_REQUESTS if count in check.requests]
    purpose = "kept for the next start" if check is None else "to check the table"
    logger.info(
        "DSPARK: measuring step times (at most about %.0f s once first steps are compiled; %s)", limit_s, purpose
    )

    def progress(done: int, most: int, seconds: float) -> None:
        logger.info("DSPARK: measuring step times, pass %d of at most %d, %.1f s", done, most, seconds)

    with ExitStack() as batches, torch.no_grad():
        loads: dict[tuple[int, int], MeasuredSteps] = {}

        def load(requests: int, context: int) -> MeasuredSteps:
            batches.close()  # the rows of the load before
            dummy = batches.enter_context(DummyBatch(target_worker, requests, context, window))
            if (requests, context) not in loads:
                loads[requests, context] = MeasuredSteps(executors, dummy, max_verify)
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
            requests=requests,
            drafts=range(max_verify + 1),
            contexts=contexts,
            limit_s=limit_s,
            tiers=() if captured is None else captured.tiers.timed,
            monotone=device == "cpu",
            progress=progress,
            clock=lambda: agreement.share(time.perf_counter()),
        )


def most_requests(runner: Any) -> int:
    """Return the requests of the largest step that is measured: SGLang admits as many as the free memory allows."""
    return min(most_running(runner), _MAX_REQUESTS)


def most_running(runner: Any) -> int:
    """Return how many requests may run at a time."""
    return min(int(runner.max_running_requests), int(runner.req_to_token_pool.size))


class MeasuredSteps:
    """Decode steps on a dummy batch of greedy requests, in the two parts that a table has times of.

    Attributes:
        queues: whether calls may return before the device has finished.
        wait: returns when it has.
    """

    def __init__(self, executors: ExecutorSelector, dummy: DummyBatch, max_verify: int) -> None:
        self._executors, self._dummy = executors, dummy
        batch = dummy.fresh()
        bs, device = len(batch.seq_lens), batch.seq_lens.device
        self.queues = device.type == "cuda"
        self.wait: Callable[[], None] = torch.cuda.synchronize if self.queues else lambda: None
        rows = SamplingBatch.from_lists([0.0] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs, device)
        # Graphs need no batch of SGLang's: making one would count as time of the step.
        self._step = replace(read_decode_batch(batch, rows, seed=0, step=0), batch=None)
        tokens = dummy.tokens(max_verify + 1)
        # Contiguous: ranks adopt each other's drafts in place.
        self._tokens = [tokens[:, 1 : depth + 1].contiguous() for depth in range(max_verify + 1)]

    def draft(self, depth: int) -> None:
        """Draft blocks of so many drafts, in a graph where a step of so many requests is served from one."""
        # A budget of 0: with all drafts verified, a step may be too large for the graphs that other budgets fit into.
        decision = StepDecision(depth, TopK(0))
        executor = self._executors.select(self._step, decision)
        executor.stage(self._step, decision)
        executor.draft(self._step, decision)

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        step, decision = self._step, StepDecision(drafts, FixedLength())
        draft = DraftOutput(DraftBlock(self._tokens[drafts]), None, [drafts] * len(step))
        executor = self._executors.select(step, decision)
        executor.stage(step, decision)
        if not executor.in_graphs:
            step = replace(step, batch=self._dummy.fresh())
        executor.finish(step, decision, draft, StepHooks())
