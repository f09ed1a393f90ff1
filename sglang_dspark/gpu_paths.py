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
    "graphs": GpuPath(
        "each step replays CUDA graphs; one of them drafts and chooses which drafts to verify",
        "h200/equal_work/sweep.csv",
    ),
    "fused-graphs": GpuPath(
        "in greedy steps, one CUDA graph runs the target, the acceptance and the commit", "h200/equal_work/sweep.csv"
    ),
    "fused-layers": GpuPath(
        "each layer of the drafter takes about twelve kernel launches", "h200/equal_work/sweep.csv"
    ),
    "walk": GpuPath("one kernel launch drafts one position of the blocks of all requests", "h200/kernels.json"),
    "auto": GpuPath(
        "the policy `auto` chooses from measured step times how many drafts to verify", "h200/sweep/sweep.csv"
    ),
    "draft-vocabulary": GpuPath(
        "the drafter proposes only the tokens of a given list",
        "h200/equal_work/sweep.csv",
        "--speculative-dspark-draft-vocabulary",
        "draft_vocabulary",
    ),
    "prompt-rows": GpuPath(
        "short prompts run with the verification in place of a prefill, where step times say that it is faster",
        named_by=f"{_UNPROVEN} prompt-rows",
        option="prompt_rows",
    ),
    "held-rows": GpuPath(
        "steps without drafts leave the drafter's K/V of up to 512 tokens to the next step with drafts",
        named_by=f"{_UNPROVEN} held-rows",
    ),
    "survivals": GpuPath(
        "one kernel launch computes the survival probabilities of all drafts; PyTorch needs six launches",
        named_by=f"{_UNPROVEN} survivals",
    ),
    "int8": GpuPath(
        "the GPU reads the weights of the drafter's layers and heads in 8 bits",
        named_by="--speculative-dspark-draft-quantization int8",
        option="draft_quantization",
    ),
    "scheduled": GpuPath(
        "SGLang's own DSPARK worker follows the plugin's policies; an older version was slower with them at 1 and 16 "
        "users",
        named_by="--speculative-dspark-engine scheduled",
    ),
    "mixed-chunks": GpuPath(
        "chunks of prompts share forward passes with running requests", named_by="--enable-mixed-chunk"
    ),
    "self-check": GpuPath(
        "kernels are compared with plain PyTorch, and CUDA graphs with eager steps, at the start",
        named_by="--speculative-dspark-self-check",
        option="self_check",
    ),
    "same-bits": GpuPath(
        "attention sums over keys in tiles that begin at fixed positions, in prefills too",
        named_by="--enable-deterministic-inference",
    ),
    "memory-graphs": GpuPath(
        "`/release_memory_occupation` also releases the memory of CUDA graphs",
        named_by="SGLANG_MEMORY_SAVER_CUDA_GRAPH=1",
    ),
    "one-launch-attention": GpuPath(
        "where attention splits a context, one launch computes and combines the parts; always on, because the code "
        "that it replaced is gone"
    ),
    "inverted-draws": GpuPath(
        "sampled drafts and tokens are drawn by inverting the cumulative distribution; always on, because the code "
        "that it replaced is gone"
    ),
    "shortlist-walk": GpuPath(
        "one kernel launch draws the blocks of a DFlash 2 drafter; always on, because the code that it replaced is gone"
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
