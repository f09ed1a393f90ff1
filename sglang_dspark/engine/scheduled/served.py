"""Refuses what SGLang's own worker would verify wrongly if requests verify different numbers of drafts."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs

from sglang_dspark.config import flag_name
from sglang_dspark.errors import ConfigError

_INSTEAD = f"or {flag_name('engine')} builtin"


def refuse_unserved(worker: Any) -> None:
    """Look at a worker that is ready to serve.

    Raises:
        ConfigError: with what is not served and the remedy.
    """
    runner, args = worker.model_runner, resolving_view(worker.server_args)
    backend = runner.attn_backend
    if not backend.supports_ragged_verify_graph:
        raise ConfigError(
            f"{flag_name('engine')} scheduled cannot verify with the attention backend "
            f"{backend.decode_attention_backend_str or type(backend).__name__}, which takes as many rows of every "
            f"request; pass --attention-backend fa3, {_INSTEAD}"
        )
    for what, found in _unserved(worker, args).items():
        if found:
            raise ConfigError(f"{flag_name('engine')} scheduled does not serve {what}; drop it, {_INSTEAD}")
    if worker.device != "cpu" and runner.decode_cuda_graph_runner is None:
        raise ConfigError(
            f"{flag_name('engine')} scheduled needs CUDA graphs of decoding: without them SGLang waits for the device "
            f"in every step; drop --disable-cuda-graph, {_INSTEAD}"
        )


def _unserved(worker: Any, args: Any) -> dict[str, bool]:
    """Return what the worker does not serve under our schedule, and whether it is asked for."""
    runner = worker.model_runner
    return {
        "prefill and decode servers apart": args.disaggregation_mode != "null",
        "pipeline stages": args.pp_size > 1,
        "several nodes": args.nnodes > 1,
        "attention data parallelism": bool(args.enable_dp_attention),
        "adapters": bool(args.enable_lora),
        "simulated acceptance (SGLANG_SIMULATE_ACC_LEN)": envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
        "positions of three coordinates": runner.model_config.model_is_mrope,
        "n-gram embeddings": getattr(runner.ngram_embedding_manager, "engram_hasher", None) is not None,
    }
