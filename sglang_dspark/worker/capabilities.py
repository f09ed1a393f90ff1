"""Describe the server for ``GET /dspark/capabilities`` and the log."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from sglang_dspark.config import POLICY_NAMES, DSparkConfig
from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.forward.graphs import has_prefill_graphs
from sglang_dspark.engine.support import versions
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.speculation import Speculation
from sglang_dspark.worker.executors.selector import ExecutorSelector


def capabilities(server_args: Any, model_runner: Any, executors: ExecutorSelector, max_verify: int) -> dict[str, Any]:
    """Return JSON: the decode path and why, versions, checkpoints, policies and features.

    Args:
        server_args, model_runner: SGLang's, of the server and of its target.
        executors: of the server.
        max_verify: most drafts that a step verifies per request.
    """
    options: DSparkConfig = attached(server_args).config
    drafter, schedule = executors.eager.drafter, executors.eager.schedule
    model, described = model_runner.model_config, drafter.describe(server_args.speculative_draft_model_path)
    drafting = "requests with a preset speculate" if described is None else "the drafter fits the target"
    on_gpu = model_runner.device == "cuda"
    has_head = schedule.forecast.calibration is not None
    return {
        "effective_decode_path": "dspark",
        "reason": f"selected by --speculative-algorithm, and {drafting}",
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": str(model_runner.dtype).removeprefix("torch."),
        "target": {
            "path": server_args.model_path,
            "name": server_args.served_model_name,
            "architecture": (model.hf_config.architectures or [None])[0],
            "vocab_size": model.hf_text_config.vocab_size,
            "context_length": model.context_len,
        },
        "drafter": described,
        "simulated_acceptance": options.acceptance_profile(drafter.gamma),
        "block_size": drafter.gamma,
        "max_verify": max_verify,
        "max_running_requests": int(model_runner.max_running_requests),
        "policy": schedule.policy.name,
        "policies": {name: _policy(schedule, name, on_gpu=on_gpu) for name in POLICY_NAMES},
        "features": {
            "speculation_fields": _speculation_fields(has_head=has_head),
            "cuda_graphs": executors.captured is not None,
            "overlap": not server_args.disable_overlap_schedule,
            "prefill_attention": model_runner.attn_backend.prefill_attention_backend_str,
            "prefill_cuda_graphs": has_prefill_graphs(model_runner),
            "decode_attention": model_runner.attn_backend.decode_attention_backend_str,
            "tensor_parallel_size": server_args.tp_size,
            "online_calibration": has_head and options.online_calibration,
            "prometheus": bool(server_args.enable_metrics),
        },
    }


def in_one_line(found: dict[str, Any]) -> str:
    """Return what :func:`capabilities` found, for the log."""
    features, drafter = found["features"], _drafter_in_words(found["drafter"])
    prefill, decode = ("with" if features[name] else "without" for name in ("prefill_cuda_graphs", "cuda_graphs"))
    available = [name for name, policy in found["policies"].items() if policy["available"]]
    return (
        f"effective decode path {found['effective_decode_path']} ({found['reason']}); policy {found['policy']} of "
        f"{', '.join(available)}; {drafter}; "
        f"prefill by {features['prefill_attention']} {prefill} CUDA graphs, "
        f"decode by {features['decode_attention']} {decode} CUDA graphs, "
        f"overlap {'on' if features['overlap'] else 'off'}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    )


def _drafter_in_words(drafter: dict[str, Any] | None) -> str:
    if drafter is None:
        return "no drafter"
    markov = f"{drafter['markov_head_type']} Markov head of rank {drafter['markov_rank']}"
    return (
        f"drafter {drafter['path']}: block size {drafter['block_size']}, {drafter['num_hidden_layers']} layers, taps "
        f"{drafter['target_layer_ids']}, {markov if drafter['markov_rank'] else 'no Markov head'}, "
        f"{'a' if drafter['confidence_head'] else 'no'} confidence head, {drafter['vocab_size']} tokens"
    )


def _speculation_fields(*, has_head: bool) -> list[str]:
    names = [field.name for field in fields(Speculation)]
    return names if has_head else [name for name in names if name != "confidence_threshold"]


def _policy(schedule: Schedule, name: str, *, on_gpu: bool) -> dict[str, Any]:
    unavailable = schedule.why_not(name)
    return {
        "available": unavailable is None,
        "reason": unavailable,
        # On a CPU, host and device are the same.
        "waits_for_device": on_gpu and schedule.waits_for_device(name),
    }
