"""Measures how long the steps of a server take, on requests that do not exist."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from sglang_dspark.engine.scheduler.agreement import Agreement
from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch
from sglang_dspark.engine.sglang_types import ModelRunner, TpModelWorker
from sglang_dspark.scheduling.sps_profiler import SteppedLoad, measure, timed_drafts
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid

logger = logging.getLogger(__name__)

LIMIT_S = {"cpu": 60.0, "cuda": 20.0}
_CONTEXTS = (64, 1024)  # tokens per request, where pool and context limit have room for them
_MAX_REQUESTS = 256


@dataclass(frozen=True)
class Stepper:
    """The steps of a server, as far as their times are concerned.

    Attributes:
        target_worker: SGLang's worker of the target.
        agreement: of the server's ranks.
        max_verify: most drafts that a step verifies per request.
        of: makes the steps of a load.
        tiers: rows that forwards are padded to; empty if they are not.
    """

    target_worker: TpModelWorker
    agreement: Agreement
    max_verify: int
    of: Callable[[DummyBatch], SteppedLoad]
    tiers: Sequence[int] = ()


def measure_steps(stepper: Stepper, key: dict[str, str]) -> SpsTable:
    """Measure a table, which is valid for ``key``."""
    target_worker, agreement, max_verify = stepper.target_worker, stepper.agreement, stepper.max_verify
    runner, device = target_worker.model_runner, torch.device(target_worker.device).type
    window, wait = max_verify + 1, torch.cuda.synchronize if device == "cuda" else None
    room = min(runner.model_config.context_len, runner.token_to_kv_pool.size) - window
    contexts = sorted({max(1, min(context, room)) for context in _CONTEXTS})
    limit_s = LIMIT_S[device]
    logger.info(
        "DSPARK: measuring step times (at most about %.0f s once first steps are compiled; kept for the next start)",
        limit_s,
    )

    def progress(done: int, most: int, seconds: float) -> None:
        logger.info("DSPARK: measuring step times, pass %d of at most %d, %.1f s", done, most, seconds)

    with ExitStack() as batches, torch.no_grad():
        loads: dict[tuple[int, int], SteppedLoad] = {}

        def load(requests: int, context: int) -> SteppedLoad:
            batches.close()  # the rows of the load before
            dummy = batches.enter_context(DummyBatch(target_worker, requests, context, window))
            if (requests, context) not in loads:
                loads[requests, context] = stepper.of(dummy)
            return loads[requests, context]

        # What the first forwards compile (SGLang's parallel embedding) must not eat up the limit: it can take longer
        # than all the rest. One token and several are compiled apart. Kernels on a GPU were compiled by the warm-up.
        first = load(1, contexts[0])
        for drafts in (0, max_verify):
            first.verify(drafts)
        if wait is not None:
            wait()
        return measure(
            load,
            key=key,
            requests=geometric_grid(most_requests(runner)),
            drafts=timed_drafts(max_verify),
            contexts=contexts,
            limit_s=limit_s,
            tiers=stepper.tiers,
            monotone=device == "cpu",
            wait=wait,
            progress=progress,
            clock=lambda: agreement.share(time.perf_counter()),
        )


def most_requests(runner: ModelRunner) -> int:
    """Return the requests of the largest step that is measured: SGLang admits as many as the free memory allows."""
    return min(most_running(runner), _MAX_REQUESTS)


def most_running(runner: ModelRunner) -> int:
    """Return how many requests may run at a time."""
    return min(int(runner.max_running_requests), int(runner.req_to_token_pool.size))
