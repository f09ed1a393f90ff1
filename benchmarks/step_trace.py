r"""Sum the decode steps of a trace: GPU time and launches by kernel, and the time in which the GPU had nothing to do.

    python benchmarks/sweep_concurrency.py ... --trace-steps 26 --output SWEEP
    python benchmarks/step_trace.py SWEEP/traces

The sweep has SGLang profile some steps of all that speculates, at every load. This script sums all files
``*.trace.json.gz`` below the folder, which chrome://tracing and Perfetto open as well, into ``steps.json``. A step
reaches from one kernel that occurs once in it to the next: one that begins the steps of our worker or of SGLang's own,
or the one that ``--first-kernel`` names.

The project's goal is a share of its own kernels below 3 % for 64 requests. Profiling costs the host time in every
launch, so spans may be longer than without it.
"""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import pandas as pd

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import provenance

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "dspark_kernels"
FIRST_KERNELS = ("_prepare_kernel", "_simulated_accept_kernel", "memcpy32_post")
"""Of our worker; of SGLang's own where acceptance is simulated, and elsewhere."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 24
"""Kernels that are printed, those with the most GPU time."""


def summary_of(path: Path, first_kernel: str | None = None) -> dict[str, Any]:
    """Return what the steps of a trace are made of; all figures are medians over the complete steps.

    Args:
        first_kernel: begins a step; None for the first of :data:`FIRST_KERNELS` that the trace has.

    Returns:
        steps: complete ones in the trace.
        first_kernel: the one that begins them.
        span_us: from the start of a step to that of the next.
        busy_share: share of the span in which the GPU was busy.
        gpu_us: GPU time of all kernels, copies and memsets.
        own_share: share of it that this project's kernels take: what is neither target nor drafter network.
        launches: calls of the host, a graph being one.
        kernels: by name, GPU time ``us`` and ``count`` in a step, the longest first.

    Raises:
        ConfigError: the file is no trace, or holds no complete step.
    """
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (EOFError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace of torch.profiler: {error!r}") from error
    activities = sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda event: event["ts"])
    names = {activity["name"] for activity in activities}
    first_kernel = first_kernel or next((name for name in FIRST_KERNELS if name in names), FIRST_KERNELS[0])
    starts = [place for place, activity in enumerate(activities) if activity["name"] == first_kernel]
    if len(starts) < 2:
        raise ConfigError(f"{path}: no complete decode step; profile a few steps more, of a server on a GPU")
    steps = [_kernels(activities[start:end]) for start, end in pairwise(starts)]
    by_step = pd.concat(steps, keys=range(len(steps)), names=["step"])
    kernels = by_step.unstack("step", fill_value=0).T.groupby(level=0).median().T.sort_values("us", ascending=False)
    spans = [activities[end]["ts"] - activities[start]["ts"] for start, end in pairwise(starts)]
    busy = [_busy_us(activities[start:end]) for start, end in pairwise(starts)]
    launches = [len({a["args"]["correlation"] for a in activities[start:end]}) for start, end in pairwise(starts)]
    return {
        "trace": f"{path.parent.name}/{path.name}",
        "sha256": provenance.file_digest(path),
        "steps": len(steps),
        "first_kernel": first_kernel,
        "span_us": median(spans),
        "busy_share": median(part / span for part, span in zip(busy, spans, strict=True)),
        "gpu_us": float(kernels["us"].sum()),
        "own_share": float(kernels["us"][kernels.index.isin(own_kernels())].sum() / kernels["us"].sum()),
        "launches": median(launches),
        "kernels": kernels.to_dict(orient="index"),
    }


def own_kernels() -> set[str]:
    """Return the names of this project's kernels."""
    sources = (path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py"))
    return {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}


def _kernels(activities: list[dict[str, Any]]) -> pd.DataFrame:
    """Return GPU time and number by the name of the kernel."""
    frame = pd.DataFrame({"name": [a["name"] for a in activities], "us": [float(a["dur"]) for a in activities]})
    return frame.groupby("name")["us"].agg(us="sum", count="count")


def _busy_us(activities: list[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one of `activities`, given by time of start, was under way."""
    total, end = 0.0, float("-inf")
    for activity in activities:
        stop = activity["ts"] + activity["dur"]
        total += max(0.0, stop - max(end, activity["ts"]))
        end = max(end, stop)
    return total


def _text(summary: dict[str, Any]) -> str:
    kernels = [
        f"{part['us']:9.1f} us {part['us'] / summary['gpu_us']:6.1%} {part['count']:4g} times  {name[:80]}"
        for name, part in list(summary["kernels"].items())[:SHOWN]
    ]
    total = (
        f"{summary['trace']}, medians of {summary['steps']} steps: {summary['launches']:g} launches; from step to step "
        f"{summary['span_us']:.0f} us, busy {summary['busy_share']:.1%}; this project's kernels take "
        f"{summary['own_share']:.1%} of the GPU time"
    )
    return "\n".join([*kernels, total])


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--first-kernel", metavar="NAME", help=f"It begins a step.  [default: of {', '.join(FIRST_KERNELS)}]")
def main(results: Path, first_kernel: str | None) -> None:
    """Run the command line; see the module."""
    traces = sorted(results.rglob("*.trace.json.gz"))
    if not traces:
        raise click.ClickException(f"{results} has no *.trace.json.gz; record some steps first")
    summaries, unread = [], []
    for trace in traces:
        try:
            summaries.append(summary_of(trace, first_kernel))
        except DSparkError as error:
            unread.append(str(error))
    provenance.write_json(results / "steps.json", {**provenance.record(), "traces": summaries})
    for summary in summaries:
        click.echo(_text(summary))
    if unread:
        raise click.ClickException("\n".join(unread))


if __name__ == "__main__":
    main()
