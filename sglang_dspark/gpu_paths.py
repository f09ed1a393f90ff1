"""What a server does on a GPU in a way of its own, and which file shows that a GPU ran it and was not slower.

A path without such a file is off on a GPU unless the operator names it. A CPU, where tests run all of them, has its own
defaults. docs/performance.md has this table, and benchmarks/gpu.py measures the paths that are open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

UnprovenPath = Literal["prompt-rows", "held-rows", "survivals"]
"""Paths that only ``--speculative-dspark-unproven`` turns on, or else a number of rows."""


@dataclass(frozen=True)
class GpuPath:
    """One path.

    Attributes:
        what: is done by it.
        shown_by: the file below ``benchmarks/results`` that shows it; empty where it is open.
        named_by: how an operator turns it on; empty where it is on in any case.
        option: field of our options by which it is on if it has a value; empty if there is none.
    """

    what: str
    shown_by: str = ""
    named_by: str = ""
    option: str = ""


_UNPROVEN = "--speculative-dspark-unproven"

GPU_PATHS: Mapping[str, GpuPath] = {
    "graphs": GpuPath("steps are replayed from CUDA graphs, the draft with its plan", "h200/equal_work/sweep.csv"),
    "fused-graphs": GpuPath("greedy steps are one graph from the forward to the commit", "h200/equal_work/sweep.csv"),
    "fused-layers": GpuPath("a layer of the drafter is a dozen launches", "h200/equal_work/sweep.csv"),
    "walk": GpuPath("each slot of a block is drafted in one kernel launch", "h200/kernels.json"),
    "auto": GpuPath("measured step times decide how much is verified", "h200/sweep/sweep.csv"),
    "draft-vocabulary": GpuPath(
        "the drafter proposes the tokens of a list",
        "h200/equal_work/sweep.csv",
        "--speculative-dspark-draft-vocabulary",
        "draft_vocabulary",
    ),
    "prompt-rows": GpuPath(
        "short prompts are verified in place of a prefill, as many rows as step times allow",
        named_by=f"{_UNPROVEN} prompt-rows",
        option="prompt_rows",
    ),
    "held-rows": GpuPath(
        "draft K/V of steps that draft nothing waits, for up to 512 rows",
        named_by=f"{_UNPROVEN} held-rows",
    ),
    "survivals": GpuPath(
        "one launch computes the survivals of all blocks; PyTorch needs six", named_by=f"{_UNPROVEN} survivals"
    ),
    "int8": GpuPath(
        "layers and heads of the drafter are read in 8 bits",
        named_by="--speculative-dspark-draft-quantization int8",
        option="draft_quantization",
    ),
    "scheduled": GpuPath(
        "our policies decide on SGLang's own worker; at 1 and 16 users slower than without, in an older form",
        named_by="--speculative-dspark-engine scheduled",
    ),
    "mixed-chunks": GpuPath("prompts share steps with running requests", named_by="--enable-mixed-chunk"),
    "self-check": GpuPath(
        "kernels are compared with plain PyTorch, and CUDA graphs with eager steps, at the start",
        named_by="--speculative-dspark-self-check",
        option="self_check",
    ),
    "same-bits": GpuPath(
        "keys are summed in tiles at fixed positions, those of prompts too", named_by="--enable-deterministic-inference"
    ),
    "memory-graphs": GpuPath(
        "a release of memory also frees that of CUDA graphs", named_by="SGLANG_MEMORY_SAVER_CUDA_GRAPH=1"
    ),
    "one-launch-attention": GpuPath(
        "the last program of a split context combines its parts; always on, because the code that it replaced is gone"
    ),
    "inverted-draws": GpuPath(
        "sampled drafts and tokens are drawn by inverting the cumulative distribution; always on, because the code "
        "that it replaced is gone"
    ),
    "shortlist-walk": GpuPath(
        "blocks of a DFlash 2 drafter are drawn in one launch; always on, because the code that it replaced is gone"
    ),
}
"""By name. Those without a file are open."""


def is_on(path: UnprovenPath, unproven: Collection[str], *, on_gpu: bool) -> bool:
    """Return whether a server takes a path that has to be named on a GPU.

    Args:
        unproven: paths that the operator names.
    """
    return not on_gpu or path in unproven or bool(GPU_PATHS[path].shown_by)


def described(named: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return for each path of a GPU server, as JSON, whether options turn it on, and why.

    Args:
        named: paths that the operator has turned on.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, path in GPU_PATHS.items():
        shown = f"benchmarks/results/{path.shown_by}" if path.shown_by else "no GPU run shows that it is not slower"
        by = f"{'turned on by' if name in named else 'off without'} {path.named_by}; " if path.named_by else ""
        found[name] = {"on": name in named or not path.named_by, "why": f"{by}{shown}"}
    return found
