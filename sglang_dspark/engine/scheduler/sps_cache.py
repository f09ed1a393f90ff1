"""The SPS table of a server: taken from its file when it fits, else measured and written there."""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
from sglang.srt.runtime_context import get_parallel
from torch import distributed

from sglang_dspark import __version__
from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.engine.compat.arguments import name_of_start
from sglang_dspark.engine.scheduler.measure_steps import Stepper, measure_steps, most_requests
from sglang_dspark.engine.sglang_types import ServerArgs, TpModelWorker
from sglang_dspark.errors import ConfigError
from sglang_dspark.hub import checkpoint_name
from sglang_dspark.scheduling.sps_table import SpsTable

logger = logging.getLogger(__name__)

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
    path, named = (_place_in_cache(key), False) if given is None else (Path(given).expanduser(), True)
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


def _place_in_cache(key: dict[str, str]) -> Path | None:
    """Return where a table is kept; None for a user without a home, as in some containers."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return CACHE.expanduser() / f"{digest}.json"
    except RuntimeError:
        logger.warning("DSPARK: this user has no home; step times are not kept unless %s names a file", _FLAG)
        return None


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
                f"{_FLAG}={str(path)!r}: {error}; remove the file, and it is measured again, or name another one"
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
# Of a configuration: where it was read from, by which release of transformers, and what SGLang adds to it.
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
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "target": _identity(server_args.model_path, _shape(runner.model_config.hf_config.to_dict())),
        "draft": _identity(draft_path, _configuration(Path(draft_path))),
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
    """Name a checkpoint by its name and what its shape follows from, without the place where it lies."""
    return f"{checkpoint_name(model_path)}:{hashlib.sha256(content).hexdigest()[:12]}"


def _shape(config: Mapping[str, object]) -> bytes:
    """Return a target's configuration as the server runs it, overrides included: its shape follows from it."""
    shape = {key: value for key, value in config.items() if key not in _NOT_OF_THE_SHAPE}
    return json.dumps(shape, sort_keys=True, default=str).encode()


def _configuration(folder: Path) -> bytes:
    """Return the file that a drafter's shape follows from; nothing without one."""
    file = folder / "config.json"
    return file.read_bytes() if file.is_file() else b""


def _cpu_name() -> str:
    """Return the processor's model name; the architecture if the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
