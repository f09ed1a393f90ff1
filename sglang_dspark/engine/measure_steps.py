"""The SPS table of a server: taken from its file when it fits, else measured on requests that do not exist."""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import torch
from sglang.srt.runtime_context import get_parallel
from torch import distributed

from sglang_dspark import __version__
from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import decode_batch
from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.server import name_of_start
from sglang_dspark.engine.sglang_types import ModelRunner, ScheduleBatch, ServerArgs, TpModelWorker
from sglang_dspark.engine.target import slot_translation
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import cached_file
from sglang_dspark.hub import checkpoint_name
from sglang_dspark.scheduling.sps_table import SpsTable, SteppedLoad, geometric_grid, measure, timed_drafts

logger = logging.getLogger(__name__)

_FIRST_SLOT = 1  # slot 0 is padding
# Tokens differ from request to request: a forward whose tokens all choose the same experts looks cheaper than it is.
_FIRST_TOKEN, _STRIDE = 11, 7919

# If layers of a target keep more than K/V, SGLang asks each request where the radix cache wants it next. Rows that no
# request has taken name slot 0 for that: padding.
_NO_REQUEST = SimpleNamespace(rid="", lora_id=None, token_type_ids=None, kv=SimpleNamespace(mamba_next_track_idx=0))


class DummyBatch:
    """Stand for ``requests`` running requests with ``context`` committed tokens each.

    As a context manager it borrows rows of ``req_to_token`` and slots of the pool, which nothing uses yet, and clears
    the rows at the end. Requests take turns at the slots, as they do when they decode together. A step consumes its
    batch: take a :meth:`fresh` one for each.
    """

    def __init__(self, target_worker: TpModelWorker, requests: int, context: int, window: int) -> None:
        self._runner = target_worker.model_runner
        self._requests, self._context, self._window = requests, context, window

    def __enter__(self) -> Self:
        table = self._runner.req_to_token_pool.req_to_token
        columns = self._context + self._window
        slots = torch.arange(columns * self._requests, device=table.device) % (self._num_slots - _FIRST_SLOT)
        rows = torch.arange(self._requests, device=table.device)
        table[rows, :columns] = (slots.view(columns, -1).T + _FIRST_SLOT).to(table.dtype)
        pool = self._runner.token_to_kv_pool
        if (translation := slot_translation(pool)) is not None:
            # Rows of their own, as far as there are some: one for all slots would never leave the cache of a GPU.
            every = torch.arange(self._num_slots, device=table.device)
            translation[_FIRST_SLOT + every] = every % pool.size_swa + _FIRST_SLOT
        return self

    def __exit__(self, *_raised: object) -> None:
        self._runner.req_to_token_pool.req_to_token[: self._requests, : self._context + self._window] = 0
        if (translation := slot_translation(self._runner.token_to_kv_pool)) is not None:
            translation[:-1] = 0  # the last entry says -1 of -1

    @property
    def _num_slots(self) -> int:
        return int(self._runner.token_to_kv_pool.size)

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        return torch.device(self._runner.device)

    def tokens(self, num: int) -> torch.Tensor:
        """Return [requests, num] int64 tokens that are spread over the vocabulary."""
        places = torch.arange(self._requests * num, device=self._runner.device).view(num, -1).T
        return (_FIRST_TOKEN + _STRIDE * places) % int(self._runner.model_config.vocab_size)

    def fresh(self) -> ScheduleBatch:
        """Return the batch as the scheduler would hand it over."""
        device = self._runner.device
        tracked = getattr(self._runner.req_to_token_pool, "enable_mamba_extra_buffer", False)
        batch = decode_batch(
            self._runner,
            [_NO_REQUEST] * self._requests if tracked else [],
            torch.arange(self._requests, dtype=torch.int64, device=device),
            torch.full((self._requests,), self._context, dtype=torch.int64, device=device),
            [self._context] * self._requests,
        )
        batch.spec_info = DSparkDraftInput(
            bonus_tokens=self.tokens(1)[:, 0].contiguous(),
            new_seq_lens=batch.seq_lens,
            nxt_kv_lens_cpu=batch.seq_lens_cpu + 2 * self._window,
        )
        return batch


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


_FLAG = flag_name("sps_table_path")
CACHE = Path("~/.cache/sglang-dspark/sps")
_NEEDS_TABLE = ("auto", "early-stop")
_FOR_EVER = timedelta(days=1)  # SGLang ends the processes of a server of which one has failed


def load_or_measure(stepper: Stepper, options: DSparkConfig, key: dict[str, str]) -> SpsTable | None:
    """Return the table of this server; None without a file if neither policy nor bound on gaps needs one.

    Replicas take turns: the first one measures, undisturbed, and the others read its file if they are like it.

    Args:
        key: what a table is valid for, see :func:`table_key`.

    Raises:
        ConfigError: the file that the flag names is damaged, cannot be written, or was measured for something else.
    """
    args, replica = stepper.target_worker.server_args, get_parallel().dp_rank or 0
    waits = args.dp_size > 1 and stepper.agreement.leads
    with turn(name_of_start(args), replica, args.dp_size) if waits else nullcontext():
        return _load_or_measure(stepper, options, key)


def _load_or_measure(stepper: Stepper, options: DSparkConfig, key: dict[str, str]) -> SpsTable | None:
    agreement, given = stepper.agreement, options.sps_table_path
    named = given is not None
    path = cached_file(CACHE, key) if given is None else Path(given).expanduser()
    if path is None:
        logger.warning("DSPARK: this user has no home directory; step times are not kept unless %s names a file", _FLAG)
    # Rank 0's file and measurements count: on several machines the other ranks have files and clocks of their own.
    table = agreement.share(_load(path, key, named=named) if agreement.leads else None)
    # A bound on gaps needs one too, if there is a second number of drafts to measure.
    bounds = options.max_gap_ms is not None and stepper.max_verify > 0
    if table is not None or not (bounds or options.schedule in _NEEDS_TABLE):
        return table
    table = agreement.share(measure_steps(stepper, key))
    if agreement.leads:
        _save(table, path, named=named)
    return table


def _save(table: SpsTable, path: Path | None, *, named: bool) -> None:
    if path is None:
        return
    try:
        table.save(path)
    except OSError as error:
        if named:
            raise ConfigError(
                f"{_FLAG}={str(path)!r} cannot be written: {error.strerror}; name a file in a "
                "folder that this server may write to"
            ) from error
        logger.warning("DSPARK: step times cannot be kept, the next start measures them again: %s", error)
    else:
        logger.info("DSPARK: step times written to %s", path)


def _load(path: Path | None, key: dict[str, str], *, named: bool) -> SpsTable | None:
    """Return the table of a file; None without one, or if that of the cache cannot be used: it is measured again.

    Raises:
        ConfigError: the file that the flag names cannot be used.
    """
    if path is None or not os.access(path, os.F_OK):
        return None
    try:
        table = _fitting(path, key)
    except ConfigError as error:
        if named:
            raise ConfigError(
                f"{_FLAG}={str(path)!r}: {error}; remove it to have step times measured again, or name another one"
            ) from error
        logger.warning("DSPARK: step times are measured again: %s", error)
        return None
    logger.info("DSPARK: step times from %s", path)
    return table


def _fitting(path: Path, key: dict[str, str]) -> SpsTable:
    table = SpsTable.load(path)
    difference = table.mismatch(key)
    if difference is None and str(table.gamma) != key["max_verify"]:
        difference = f"it has times of up to {table.gamma} drafts, but a step verifies up to {key['max_verify']}"
    if difference is not None:
        raise ConfigError(f"SPS table {str(path)!r} does not fit this server: {difference}")
    return table


@contextmanager
def turn(start: str, replica: int, replicas: int) -> Iterator[None]:
    """Wait until all replicas have come here, and those before this one have been through the block.

    Args:
        start: names this start of the server.
        replica: number of this one, from 0; one of its ranks calls.
        replicas: their number.
    """
    path = Path(tempfile.gettempdir()) / f"sglang-dspark-{start}"
    store = distributed.FileStore(str(path), replicas)  # type: ignore[attr-defined]
    store.set(f"{replica} is here", "")
    here, through = (f"{other} is here" for other in range(replicas)), (f"{done} is through" for done in range(replica))
    store.wait([*here, *through], _FOR_EVER)
    try:
        yield
    finally:
        store.set(f"{replica} is through", "")


# Fields of SGLang's arguments that change how long a step takes.
_TIMED_ARGUMENTS = (
    *("tp_size", "nnodes", "disable_custom_all_reduce", "cpu_offload_gb", "moe_runner_backend"),
    *("fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend", "enable_fp32_lm_head", "ep_size"),
    *("flashinfer_allreduce_fusion_backend", "enable_symm_mem", "enable_torch_symm_mem", "enable_nccl_nvls"),
    *("enable_mscclpp", "enable_fused_moe_sum_all_reduce"),
    *("speculative_draft_window_size", "speculative_draft_sink_size"),
)
# Of a configuration: where it was read from, with which release of transformers, and what SGLang adds to it.
_NOT_OF_THE_SHAPE = ("_name_or_path", "transformers_version", "context_len", "encoder_only", "language_only")
_METHOD = "3"  # of measuring; another one makes tables of before useless


def table_key(
    target_worker: TpModelWorker,
    server_args: ServerArgs,
    *,
    draft_path: str,
    block_size: int,
    max_verify: int,
    cuda_graphs: str,
) -> dict[str, str]:
    """Return the properties of a server that its table depends on; ``cuda_graphs`` names those of its steps."""
    runner, on_gpu = target_worker.model_runner, torch.device(target_worker.device).type == "cuda"
    config = Path(draft_path) / "config.json"  # from which the drafter's shape follows
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "target": _identity(server_args.model_path, _shape(runner.model_config.hf_config.to_dict())),
        "draft": _identity(draft_path, config.read_bytes() if config.is_file() else b""),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantization": str(runner.model_config.quantization),
        "kv_cache_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
        "block_size": str(block_size),
        "max_verify": str(max_verify),
        "max_requests": str(most_requests(runner)),
        "cuda_graphs": cuda_graphs,
        **{name: str(getattr(server_args, name)) for name in _TIMED_ARGUMENTS},
        "method": _METHOD,
        "torch": torch.__version__,
        "sglang": version("sglang"),
        "sglang_dspark": __version__,
    }


def _identity(model_path: str, content: bytes) -> str:
    """Describe a checkpoint: its name and what its shape follows from, without the place where it lies."""
    return f"{checkpoint_name(model_path)}:{hashlib.sha256(content).hexdigest()[:12]}"


def _shape(config: Mapping[str, object]) -> bytes:
    """Return a target's configuration as the server runs it, overrides included: its shape follows from it."""
    shape = {key: value for key, value in config.items() if key not in _NOT_OF_THE_SHAPE}
    return json.dumps(shape, sort_keys=True, default=str).encode()


def _cpu_name() -> str:
    """Return the processor's model name; the architecture if the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
