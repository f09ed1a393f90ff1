"""What a server can do, for ``GET /dspark/capabilities`` and the log."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from sglang_dspark.config import SCHEDULES
from sglang_dspark.engine.support import versions
from sglang_dspark.speculation import Speculation

if TYPE_CHECKING:
    from sglang_dspark.worker.worker import DSparkWorker


def capabilities(worker: DSparkWorker) -> dict[str, Any]:
    """JSON: the decode path and why, versions, checkpoints, policies and features."""
    args, runner = worker.server_args, worker.target_worker.model_runner
    model, drafter = runner.model_config, worker.drafter.describe(args.speculative_draft_model_path)
    drafting = "requests with a preset speculate" if drafter is None else "the drafter fits the target"
    return {
        "effective_decode_path": "dspark",
        "reason": f"selected by --speculative-algorithm, and {drafting}",
        "versions": versions(),
        "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
        "dtype": str(runner.dtype).removeprefix("torch."),
        "target": {
            "path": args.model_path,
            "name": args.served_model_name,
            "architecture": (model.hf_text_config.architectures or [None])[0],
            "vocab_size": model.hf_text_config.vocab_size,
            "context_length": model.context_len,
        },
        "drafter": drafter,
        "simulated_acceptance": worker.options.acceptance_profile(worker.drafter.gamma),
        "block_size": worker.drafter.gamma,
        "max_verify": worker.max_verify,
        "max_running_requests": worker.max_running_requests,
        "policy": worker.schedule.policy.name,
        "policies": {name: _policy(worker, name) for name in SCHEDULES},
        "features": {
            "speculation_fields": _speculation_fields(has_head=worker.schedule.forecast.calibration is not None),
            "cuda_graphs": worker.graphs is not None,
            "overlap": not args.disable_overlap_schedule,
            "attention_backend": args.attention_backend,
            "tensor_parallel_size": args.tp_size,
            "online_calibration": worker.schedule.forecast.calibration is not None
            and worker.options.online_calibration,
            "prometheus": bool(args.enable_metrics),
        },
    }


def in_one_line(found: dict[str, Any]) -> str:
    """The same for the log."""
    features, drafter = found["features"], _drafter_in_words(found["drafter"])
    available = [name for name, policy in found["policies"].items() if policy["available"]]
    return (
        f"effective decode path {found['effective_decode_path']} ({found['reason']}); policy {found['policy']} of "
        f"{', '.join(available)}; {drafter}; "
        f"attention {features['attention_backend']}, CUDA graphs {'on' if features['cuda_graphs'] else 'off'}, "
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


def _policy(worker: DSparkWorker, name: str) -> dict[str, Any]:
    unavailable = worker.schedule.why_not(name)
    return {
        "available": unavailable is None,
        "reason": unavailable,
        # On a CPU, host and device are the same.
        "waits_for_device": worker.on_gpu and worker.schedule.reads_live_values(name),
    }
