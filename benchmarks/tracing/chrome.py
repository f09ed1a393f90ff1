"""GPU activities out of a Chrome trace, as torch.profiler writes it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError

KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or memset on the GPU.

    Attributes:
        start_us: microseconds on the trace's clock.
        duration_us: as the GPU reports it; what another program does in between counts.
        is_copy: a copy or memset.
        graph: number of the CUDA graph launch that replayed it; None where the host launched it by itself.
    """

    name: str
    start_us: float
    duration_us: float
    is_copy: bool
    graph: int | None


def read_trace(path: Path) -> dict[str, Any]:
    """The document in a ``.json`` or ``.json.gz`` file.

    Raises:
        ConfigError: it is not a Chrome trace, or not all of one.
    """
    try:
        content = path.read_bytes()
        document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        if isinstance(document, dict) and isinstance(document.get("traceEvents"), list):
            return document
    except (EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    raise ConfigError(f"{path} has no traceEvents; pass a Chrome trace of torch.profiler")


def gpu_names(document: dict[str, Any]) -> str:
    """Models of the GPUs that were traced, separated by commas; empty without one."""
    return ", ".join(device["name"] for device in document.get("deviceProperties", ()))


def gpu_activities(document: dict[str, Any]) -> list[Activity]:
    """Return what ran on the GPU, by time of start.

    All that one graph launch replays has the correlation number of the call that launched it.
    """
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in RUNTIME and "GraphLaunch" in event["name"]
    }
    activities = []
    for event in events:
        if event.get("cat") in (KERNEL, *COPIES):
            correlation = event["args"]["correlation"]
            activities.append(
                Activity(
                    name=event["name"],
                    start_us=event["ts"],
                    duration_us=event["dur"],
                    is_copy=event["cat"] in COPIES,
                    graph=correlation if correlation in launches else None,
                )
            )
    return sorted(activities, key=lambda activity: activity.start_us)
