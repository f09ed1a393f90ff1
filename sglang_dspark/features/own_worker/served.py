"""Refuses what SGLang's own worker would verify wrongly under our schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs

from sglang_dspark.config import flag_name
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.own_worker.server import MODE

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

_INSTEAD = f"or {flag_name('engine')} builtin"


def refuse_unserved(worker: DSparkWorkerV2, *, by_request: bool) -> None:
    """Look at a worker that is ready to serve.

    Args:
        by_request: whether requests verify different numbers of drafts.

    Raises:
        ConfigError: with what is not served and the remedy.
    """
    args = resolving_view(worker.server_args)
    unserved = _unserved(args) | ({} if by_request else _unserved_widths(worker, args))
    for what, found in unserved.items():
        if found:
            raise ConfigError(f"{flag_name('engine')} scheduled does not serve {what}; drop it, {_INSTEAD}")
    ragged = _unserved_rows(worker, args) if by_request else {}
    for what, found in ragged.items():
        if found:
            raise ConfigError(
                f"{flag_name('engine')} scheduled cannot verify different numbers of drafts with {what}; set "
                f"{MODE}=static for the same number of drafts of every request, {_INSTEAD}"
            )


def _unserved(args: ServerArgs) -> dict[str, bool]:
    """Return what is not served whatever is verified, and whether it is asked for."""
    return {
        "prefill-decode disaggregation": args.disaggregation_mode != "null",
        "pipeline stages": args.pp_size > 1,
        "several nodes": args.nnodes > 1,
        "attention data parallelism": args.attn_dp_size > 1,
        "two-batch overlap": bool(args.enable_two_batch_overlap),
        "PD multiplexing": bool(args.enable_pdmux),
        "simulated acceptance (SGLANG_SIMULATE_ACC_LEN)": envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
    }


def _unserved_rows(worker: DSparkWorkerV2, args: ServerArgs) -> dict[str, bool]:
    """Return the same of what would verify ragged rows wrongly, or wait for the device in every step."""
    runner = worker.model_runner
    backend = runner.attn_backend
    name = backend.decode_attention_backend_str or type(backend).__name__
    without_graphs = worker.device != "cpu" and runner.decode_cuda_graph_runner is None
    return {
        f"the attention backend {name}": not backend.supports_ragged_verify_graph,
        "adapters": bool(args.enable_lora),
        "positions of three coordinates": runner.model_config.model_is_mrope,
        "n-gram embeddings": getattr(runner.ngram_embedding_manager, "engram_hasher", None) is not None,
        "--disable-cuda-graph": without_graphs,
    }


def _unserved_widths(worker: DSparkWorkerV2, args: ServerArgs) -> dict[str, bool]:
    """Return the same of what SGLang keeps once for the graphs of all widths, or hands from one step to the next."""
    captured = worker.model_runner.decode_cuda_graph_runner is not None
    return {
        "adapters in CUDA graphs": bool(args.enable_lora) and captured,
        "SGLANG_DSPARK_DEFER_CONTEXT_KV": envs.SGLANG_DSPARK_DEFER_CONTEXT_KV.get(),
        "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY": envs.SGLANG_OPT_DSV41_TARGET_METADATA_EARLY.get(),
    }
