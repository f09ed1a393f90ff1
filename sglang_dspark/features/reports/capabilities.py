"""Describe the server for ``GET /dspark/capabilities`` and the log."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_model, get_serving

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.declared import field_types
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.graphs import has_prefill_graphs
from sglang_dspark.engine.scheduler import Decoder
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import versions
from sglang_dspark.gpu_paths import GPU_PATHS, described
from sglang_dspark.speculation import Speculation


def capabilities(decoder: Decoder) -> dict[str, Any]:
    """Return JSON: the decode path and why, versions, checkpoints, policies and features."""
    server_args, model_runner = decoder.server_args, decoder.target_worker.model_runner
    schedule, decoding = decoder.schedule, decoder.decoding()
    server = speculating(server_args)
    assert server is not None, "a scheduler that decodes with DSPARK asks"
    options = server.config
    model, on_gpu = model_runner.model_config, model_runner.device == "cuda"
    path = get_model().model_path
    has_head = schedule.forecast.calibration is not None
    return {
        "effective_decode_path": "dspark",
        "engine": server.engine,
        "reason": decoding.reason,
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": str(model_runner.dtype).removeprefix("torch."),
        "target": {
            "path": path,
            # After an update from disk, SGLang serves the target under its new path.
            "name": server_args.served_model_name if path == server_args.model_path else path,
            "architecture": (model.hf_config.architectures or [None])[0],
            "vocab_size": model.hf_text_config.vocab_size,
            "context_length": model.context_len,
            "weight_version": get_serving().weight_version,
            **{key: said for feature in all_features() for key, said in feature.describe_target(model_runner).items()},
        },
        "drafter": decoding.drafter,
        "simulated_acceptance": options.acceptance_profile(decoding.gamma),
        "block_size": decoding.gamma,
        "max_verify": schedule.max_verify,
        "max_running_requests": int(model_runner.max_running_requests),
        "policy": schedule.policy.name,
        "policies": {
            name: {
                "available": (unavailable := schedule.why_not(name)) is None,
                "reason": unavailable,
                "waits_for_device": on_gpu and schedule.waits_for_device(name),
            }
            for name in POLICY_NAMES
        },
        **{key: said for part in decoder.parts for key, said in part.describe().items()},
        "gpu_paths": described(_named_paths(server_args, server)) if decoder.control.on_gpu else {},
        "adjusted_flags": list(server.adjusted) if isinstance(server, DSparkServer) else [],
        "features": {
            "speculation_fields": _speculation_fields(server),
            "cuda_graphs": decoding.cuda_graphs,
            "overlap": not server_args.disable_overlap_schedule,
            "prefill_attention": model_runner.attn_backend.prefill_attention_backend_str,
            "prefill_cuda_graphs": has_prefill_graphs(model_runner),
            "decode_attention": model_runner.attn_backend.decode_attention_backend_str,
            "tensor_parallel_size": server_args.tp_size,
            "data_parallel_size": server_args.dp_size,
            "online_calibration": has_head and options.online_calibration,
            "prometheus": bool(server_args.enable_metrics),
        },
    }


def in_one_line(found: dict[str, Any]) -> str:
    """Return one line for the log with the findings of :func:`capabilities`."""
    available = [name for name, policy in found["policies"].items() if policy["available"]]
    return (
        f"effective decode path {found['effective_decode_path']} ({found['reason']}); policy {found['policy']} of "
        f"{', '.join(available)}; block size {found['block_size']}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    )


def _named_paths(server_args: ServerArgs, server: DSparkServer | OtherServer) -> list[str]:
    """Return the paths of a GPU that the operator has turned on, by our options or by SGLang's."""
    config = server.config
    asked: dict[str, bool] = {
        "scheduled": server.engine == "scheduled",
        "mixed-chunks": bool(server_args.enable_mixed_chunk),
        "memory-graphs": bool(server_args.enable_memory_saver) and envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get(),
        **{name: bool(getattr(config, path.option)) for name, path in GPU_PATHS.items() if path.option},
    }
    return [*(name for name, given in asked.items() if given), *config.unproven]


def _speculation_fields(server: DSparkServer | OtherServer) -> list[str]:
    found = list(field_types(Speculation))
    if not server.has_confidence_head:
        found.remove("confidence_threshold")
    for feature in all_features():
        if (keys := feature.request_keys) is not None:
            found += [key for key in keys.key_types() if key not in keys.unserved(server)]
    return found
