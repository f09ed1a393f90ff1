"""Describe the server for ``GET /dspark/capabilities`` and the log."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_serving

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.declared import field_types
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.graphs import has_prefill_graphs
from sglang_dspark.engine.scheduler import Decoder
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.support import versions
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.speculation import Speculation


def capabilities(decoder: Decoder) -> dict[str, Any]:
    """Return JSON: the decode path and why, versions, checkpoints, policies and features."""
    server_args, model_runner = decoder.server_args, decoder.target_worker.model_runner
    schedule, decoding = decoder.schedule, decoder.decoding()
    server = speculating(server_args)
    assert server is not None, "a scheduler that decodes with DSPARK asks"
    options = server.config
    model, on_gpu = model_runner.model_config, model_runner.device == "cuda"
    has_head = schedule.forecast.calibration is not None
    return {
        "effective_decode_path": "dspark",
        "engine": server.engine,
        "reason": decoding.reason,
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": str(model_runner.dtype).removeprefix("torch."),
        "target": {
            "path": server_args.model_path,
            "name": server_args.served_model_name,
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
        "policies": {name: _policy(schedule, name, on_gpu=on_gpu) for name in POLICY_NAMES},
        **{key: said for part in decoder.parts for key, said in part.describe().items()},
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
    features = found["features"]
    prefill, decode = ("with" if features[name] else "without" for name in ("prefill_cuda_graphs", "cuda_graphs"))
    available = [name for name, policy in found["policies"].items() if policy["available"]]
    return (
        f"effective decode path {found['effective_decode_path']} ({found['reason']}); policy {found['policy']} of "
        f"{', '.join(available)}; block size {found['block_size']}; "
        f"prefill by {features['prefill_attention']} {prefill} CUDA graphs, "
        f"decode by {features['decode_attention']} {decode} CUDA graphs, "
        f"overlap {'on' if features['overlap'] else 'off'}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    )


def _speculation_fields(server: DSparkServer | OtherServer) -> list[str]:
    found = list(field_types(Speculation))
    if not server.has_confidence_head:
        found.remove("confidence_threshold")
    for feature in all_features():
        if feature.request_keys:
            keys = feature.load_request_keys()
            found += [key for key in keys.key_types() if key not in keys.unserved(server)]
    return found


def _policy(schedule: Schedule, name: str, *, on_gpu: bool) -> dict[str, Any]:
    unavailable = schedule.why_not(name)
    return {
        "available": unavailable is None,
        "reason": unavailable,
        # On a CPU, host and device are the same.
        "waits_for_device": on_gpu and schedule.waits_for_device(name),
    }
