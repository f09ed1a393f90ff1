"""The SPS table of a server: taken from its file when it fits, else measured with the worker's own stages."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from dspark_kernels import DraftBlock, SamplingRows

from sglang_dspark import __version__
from sglang_dspark.config import flag_name
from sglang_dspark.draft import reduced_vocabulary
from sglang_dspark.engine.scheduler.batch import read_decode_batch
from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch
from sglang_dspark.errors import ConfigError
from sglang_dspark.hub import checkpoint_name
from sglang_dspark.scheduling.sps_profiler import measure
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
from sglang_dspark.step.choice import Choice, Rule
from sglang_dspark.step.state import Drafted

if TYPE_CHECKING:
    from sglang_dspark.worker.worker import DSparkWorker

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/sglang-dspark/sps")
LIMIT_S = {"cpu": 60.0, "cuda": 20.0}
_CONTEXTS = (64, 1024)  # tokens per request, where pool and context limit have room for them
_MAX_REQUESTS = 256
_NEEDS_TABLE = ("auto", "early-stop")


def load_or_measure(worker: DSparkWorker) -> SpsTable | None:
    """The table of this server; None for a policy that needs none and has no file.

    Raises:
        ConfigError: the file that the flag names was measured for something else.
    """
    options = worker.options
    key = _key(worker)
    named = None if options.sps_table_path is None else Path(options.sps_table_path).expanduser()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = named or _cache_folder() / f"{digest}.json"
    # Rank 0's file and measurements count: on several machines the other ranks have files and clocks of their own.
    usable = os.access(path, os.R_OK if named is None else os.F_OK)  # a cache that cannot be read is none
    table = worker.agreement.share(_load(path, key) if usable and worker.tp_rank == 0 else None)
    if table is not None or options.schedule not in _NEEDS_TABLE:
        return table
    table = worker.agreement.share(_measure(worker, key))
    if worker.tp_rank == 0:
        _save(table, path, named is not None)
    return table


def _cache_folder() -> Path:
    try:
        return CACHE.expanduser()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "sglang-dspark" / "sps"


def _save(table: SpsTable, path: Path, named: bool) -> None:
    try:
        table.save(path)
    except OSError as error:
        if named:
            raise ConfigError(
                f"{flag_name('sps_table_path')}={str(path)!r} cannot be written: {error.strerror}; name a file in a "
                "folder that this server may write to"
            ) from error
        logger.warning("DSPARK: step times cannot be kept, the next start measures them again: %s", error)
    else:
        logger.info("DSPARK: step times written to %s", path)


def _load(path: Path, key: dict[str, str]) -> SpsTable:
    table = SpsTable.load(path)
    if difference := table.mismatch(key):
        raise ConfigError(
            f"{flag_name('sps_table_path')}={str(path)!r} does not fit this server: {difference}; remove the file, "
            "and it is measured anew, or name another one"
        )
    logger.info("DSPARK: step times from %s", path)
    return table


def _measure(worker: DSparkWorker, key: dict[str, str]) -> SpsTable:
    runner = worker.target_worker.model_runner
    window = worker.max_verify + 1
    most = _most_requests(worker)
    room = min(runner.model_config.context_len, runner.token_to_kv_pool.size) - window
    contexts = sorted({max(1, min(context, room)) for context in _CONTEXTS})
    limit_s = LIMIT_S[worker.device.type]
    logger.info("DSPARK: measuring step times (at most about %.0f s; kept for the next start)", limit_s)

    def progress(done: int, most: int, seconds: float) -> None:
        logger.info("DSPARK: measuring step times, pass %d of at most %d, %.1f s", done, most, seconds)

    with ExitStack() as batches, torch.no_grad():
        loads: dict[tuple[int, int], _Steps] = {}

        def load(requests: int, context: int) -> _Steps:
            batches.close()  # the rows of the load before
            dummy = batches.enter_context(DummyBatch(worker.target_worker, requests, context, window))
            if (requests, context) not in loads:
                loads[requests, context] = _Steps(worker, dummy)
            return loads[requests, context]

        # What the first forwards compile (SGLang's parallel embedding) must not eat up the limit: it can take longer
        # than all the rest. One token and several are compiled apart. Kernels on a GPU were compiled by the warm-up.
        first = load(1, contexts[0])
        for drafts in (0, worker.max_verify):
            first.verify(drafts)
        return measure(
            load,
            key=key,
            requests=geometric_grid(most),
            drafts=range(worker.max_verify + 1),
            contexts=contexts,
            limit_s=limit_s,
            tiers=() if worker.graphs is None else worker.graphs.tiers.tokens,
            monotone=worker.device.type == "cpu",
            progress=progress,
            clock=lambda: worker.agreement.share(time.perf_counter()),
        )


def _most_requests(worker: DSparkWorker) -> int:
    """Requests of the largest step that is measured. SGLang derives what it admits from the memory that is free."""
    runner = worker.target_worker.model_runner
    return min(int(runner.max_running_requests), runner.req_to_token_pool.size, _MAX_REQUESTS)


class _Steps:
    """The stages of a decode step on a dummy batch of greedy requests."""

    def __init__(self, worker: DSparkWorker, dummy: DummyBatch) -> None:
        self._worker, self._dummy = worker, dummy
        self._sync: Callable[[], None] = torch.cuda.synchronize if worker.device.type == "cuda" else lambda: None
        batch = dummy.fresh()
        bs = len(batch.seq_lens)
        rows = SamplingRows.from_lists([0.0] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs, worker.device)
        self._step = read_decode_batch(batch, rows, seed=0, step=0)
        # Contiguous: ranks adopt each other's drafts in place.
        drafts = range(1, worker.max_verify + 1)
        self._tokens = {depth: self._step.anchors[:, None].repeat(1, depth) for depth in drafts}

    def draft(self, depth: int) -> None:
        choice = Choice(Rule.UNIFORM, depth)
        self._worker.stages(self._step, choice).draft(self._step, choice, self._step.rows, with_confidence=True)
        self._sync()

    def verify(self, drafts: int) -> None:
        step, choice = self._step, Choice(Rule.UNIFORM, drafts)
        block = DraftBlock(self._tokens[drafts], None, None) if drafts else None
        stages = self._worker.stages(step, choice)
        plan = stages.plan(step, Drafted(block, None, [drafts] * len(step)), choice)
        # Graphs have staged the step already, and need no batch: making one would count as time of the step.
        batch = self._dummy.fresh() if stages is self._worker else None
        output, captured = stages.verify(batch, step, plan)
        accepted = stages.accept(step, block, plan, output)
        stages.commit(plan, accepted, captured)
        self._sync()


def _key(worker: DSparkWorker) -> dict[str, str]:
    """What a table is valid for."""
    args = worker.server_args
    on_gpu = worker.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "target": _digest(args.model_path),
        "draft": _digest(args.speculative_draft_model_path),
        "dtype": str(worker.target_worker.model_runner.dtype).removeprefix("torch."),
        "max_verify": str(worker.max_verify),
        "max_requests": str(_most_requests(worker)),
        "cuda_graphs": "none" if worker.graphs is None else worker.graphs.tiers.digest,
        "tp_size": str(args.tp_size),
        "torch": torch.__version__,
        "sglang": version("sglang"),
        "sglang_dspark": __version__,
    }


def _digest(model_path: str) -> str:
    """Identity of a checkpoint's shape: its name, and what its small files say, without the place where it lies."""
    files = [Path(model_path) / name for name in ("config.json", reduced_vocabulary.FILE)]
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return f"{checkpoint_name(model_path)}:{hashlib.sha256(content).hexdigest()[:12]}"


def _cpu_name() -> str:
    """The processor's model name; the architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
