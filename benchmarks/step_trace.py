r"""Trace decode steps on a GPU: GPU time and launches by kernel, and the time in which the GPU had nothing to do.

    python benchmarks/step_trace.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS \
        --config static:5 --concurrency 64 --server-flags "--max-running-requests 64"

The script starts a server with DSPARK, keeps so many users busy with greedy answers, and has SGLang profile some steps
(``POST /start_profile``). RESULTS, a new folder, gets ``trace.json.gz``, which chrome://tracing and Perfetto open,
``provenance.json``, and on a GPU ``step.json``, a summary. A step reaches from one ``_prepare_kernel`` to the next.

    python benchmarks/step_trace.py --trace TRACE.json.gz --output RESULTS

A trace that is there is summed likewise, of any engine: where there is no ``_prepare_kernel``, a step begins with the
first of the kernels that occur once in it, or with the one that ``--first-kernel`` names.

The project's goal is a share of its own kernels below 3 % for 64 requests. Profiling costs the host time in every
launch, so spans may be longer than without it.

On a CPU the script keeps the trace, which has no kernels to summarise.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import pandas as pd
from rich.console import Console
from rich.table import Table
from serving.client import Sampling
from serving.configurations import parse_configurations
from serving.profiler import record_steps
from serving.prompts import load_mixed_prompts

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

PATH = click.Path(path_type=Path, exists=True)
KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "dspark_kernels"
FIRST_KERNEL = "_prepare_kernel"
RECORDED = {"target": "--target", "draft": "--draft", "files": "--prompts"}
"""Options that a recording needs."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 24
"""Kernels that are printed, those with the most GPU time."""


def summary_of(path: Path, first_kernel: str | None = None) -> dict[str, Any]:
    """Return what the steps of a trace are made of; all figures are medians over the complete steps.

    Args:
        first_kernel: begins a step; None finds one.

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
    first_kernel = first_kernel or _first_kernel([activity["name"] for activity in activities])
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
        "trace": path.name,
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


def _first_kernel(names: Sequence[str]) -> str | None:
    """Return the kernel that begins a step of ours, else the first one that occurs once in a step; None without any.

    Kernels of a layer occur many times in a step, those of prefills hardly ever; most others occur once.
    """
    counts = Counter(names)
    if FIRST_KERNEL in counts:
        return FIRST_KERNEL
    repeated = Counter(count for count in counts.values() if count > 1)
    if not repeated:
        return None
    steps = max(repeated, key=lambda count: (repeated[count], count))
    return next(name for name in names if counts[name] == steps)


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


def _print(summary: dict[str, Any]) -> None:
    table = Table(title=f"GPU time of a decode step by kernel, medians over {summary['steps']} steps")
    for name in ("kernel", "us", "share", "number"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for name, part in list(summary["kernels"].items())[:SHOWN]:
        table.add_row(name[:80], f"{part['us']:.1f}", f"{part['us'] / summary['gpu_us']:.1%}", f"{part['count']:g}")
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False, highlight=False)
    console.print(table)
    console.print(
        f"{summary['launches']:g} launches; from step to step {summary['span_us']:.0f} us, busy "
        f"{summary['busy_share']:.1%}; this project's kernels take {summary['own_share']:.1%} of the GPU time"
    )


def _record(options: dict[str, Any]) -> Path:
    output, users = options["output"], options["concurrency"]
    if (output / "trace.json.gz").exists():
        raise ConfigError(f"--output {output} holds a trace already; name another folder")
    (configuration,) = parse_configurations([options["config"]], options["dtype"])
    if not configuration.is_dspark:
        raise ConfigError(f"--config {options['config']} does not decode with DSPARK; name one of its policies")
    prompts = load_mixed_prompts(options["files"])
    record = provenance.record() | {"prompts": provenance.files(options["files"])}
    on_cpu = options["device"] == "cpu"
    flags = (*configuration.server_flags(str(options["draft"])), *options["server_flags"].split())
    sampling = Sampling(options["max_tokens"], temperature=0.0, ignore_eos=True, raw=options["raw_prompts"])
    output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=output) as folder,
        LaunchedServer(
            options["target"], *(CPU_FLAGS if on_cpu else ()), *flags, env=CPU_ENV if on_cpu else None
        ) as server,
    ):
        server.post_json("/dspark/policy", configuration.policy_fields)
        trace = record_steps(
            server,
            [prompts[user % len(prompts)] for user in range(users)],
            sampling,
            options["steps"],
            ["CPU"] if on_cpu else ["CPU", "GPU"],
            Path(folder),
        )
        provenance.write_json(output / "provenance.json", record)
        return trace.rename(output / "trace.json.gz")


@click.command(help=__doc__)
@click.option("--target", type=PATH)
@click.option("--draft", type=PATH)
@click.option("--prompts", "files", type=click.Path(path_type=Path), multiple=True)
@click.option("--trace", type=PATH, help="Sum the steps of this trace instead of recording one.")
@click.option("--first-kernel", metavar="NAME", help="The kernel that begins a step, by its whole name.")
@click.option("--config", default="auto", show_default=True, help="A policy, as in sweep_concurrency.py.")
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(1), help="Number of users.")
@click.option("--steps", default=32, show_default=True, type=click.IntRange(1), help="Steps to profile.")
@click.option("--max-tokens", default=1024, show_default=True, type=click.IntRange(1), help="Length of an answer.")
@click.option("--raw-prompts", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of the server, as one text.")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(**options: Any) -> None:
    """Command line; see the module."""
    try:
        if (trace := options["trace"]) is None:
            if missing := [option for name, option in RECORDED.items() if not options[name]]:
                raise click.UsageError(f"pass {', '.join(missing)} to record a trace, or --trace to sum one")
            trace = _record(options)
        if options["device"] == "cuda":
            summary = summary_of(trace, options["first_kernel"])
            options["output"].mkdir(parents=True, exist_ok=True)
            provenance.write_json(options["output"] / "step.json", summary)
            _print(summary)
    except (DSparkError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
