r"""What a decode step on a GPU is made of: launches, GPU time by stage, and how long the GPU had nothing to do.

    python benchmarks/step_trace.py record --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS \
        --config static:5 --concurrency 64 --server-flags "--max-running-requests 64"
    python benchmarks/step_trace.py summarise RESULTS/trace.json.gz --output RESULTS/step.json

``record`` starts a server with DSPARK, keeps so many users busy with greedy answers, and has SGLang profile some steps
(``POST /start_profile``). RESULTS, a new folder, gets ``trace.json.gz``, which chrome://tracing and Perfetto open,
``provenance.json``, and ``step.json``, its summary. ``summarise`` reads such a trace, or any of torch.profiler with
steps that CUDA graphs replay. How kernels are told apart: ``tracing/stages.py``; what the figures mean:
``tracing/summary.py``.

The project's goal is a share outside the forwards below 3 % for 64 requests. Profiling costs the host time in every
launch, so spans may be longer than without it.

``record`` has been run with a server on a CPU, where it keeps the trace, which has no kernels to summarise, and not yet
with one on a GPU. ``summarise`` is tested on a trace of an H200 that was recorded by other means.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from serving.client import Sampling
from serving.configurations import parse_configurations
from serving.prompts import load_mixed_prompts
from tracing.chrome import gpu_activities, gpu_names, read_trace
from tracing.recording import record_steps
from tracing.summary import summarise

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

PATH = click.Path(path_type=Path, exists=True)


def summary_of(path: Path) -> dict[str, Any]:
    """The summary of a trace, with where it is from.

    Raises:
        ConfigError: the file is no trace, or holds no complete step.
    """
    document = read_trace(path)
    try:
        summary = summarise(gpu_activities(document))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    source = {"trace": path.name, "sha256": provenance.file_digest(path), "gpu": gpu_names(document)}
    return source | summary


def stage_table(summary: dict[str, Any]) -> Table:
    """The stages of a step for the terminal."""
    table = Table(title=f"{summary['trace']}: {summary['gpu']}, medians over {summary['steps']} steps")
    table.add_column("stage")
    for name in ("GPU us", "share", "launches", "kernels and copies"):
        table.add_column(name, justify="right")
    for stage, part in summary["stages"].items():
        figures = (f"{part['us']:.1f}", f"{part['share']:.1%}", f"{part['launches']:g}", f"{part['activities']:g}")
        table.add_row(stage, *figures)
    launches = summary["graph_launches"] + summary["kernel_launches"] + summary["copy_launches"]
    table.add_row("step", f"{summary['gpu_us']:.1f}", "", f"{launches:g}", f"{summary['activities']:g}", style="bold")
    return table


def in_words(summary: dict[str, Any]) -> str:
    """Return what the table does not say."""
    return (
        f"launches: {summary['graph_launches']:g} graphs, {summary['kernel_launches']:g} kernels, "
        f"{summary['copy_launches']:g} copies; a graph with several stages is counted in each of them\n"
        f"from step to step {summary['span_us']:.0f} us, of which busy {summary['busy_us']:.0f} us "
        f"({summary['busy_share']:.1%})\n"
        f"outside the forwards of target and drafter: {summary['outside_forwards_share']:.1%} of the GPU time"
    )


def _summarise(paths: Sequence[Path], output: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    summaries = [summary_of(path) for path in paths]
    for summary in summaries:
        console.print(stage_table(summary))
        console.print(in_words(summary), highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        # The machine that reads a trace has no part in it.
        made = {"command": provenance.command(), "commit": provenance.commit()}
        provenance.write_json(output, made | {"traces": summaries})


def _record(options: dict[str, Any]) -> Path:
    output, users = options["output"], options["concurrency"]
    if (output / "trace.json.gz").exists():
        raise ConfigError(f"--output {output} holds a trace already; name another folder")
    (configuration,) = parse_configurations([options["config"]], (), options["dtype"])
    if not configuration.is_dspark:
        raise ConfigError(f"--config {options['config']} does not decode with DSPARK; name one of its policies")
    prompts = load_mixed_prompts(options["files"])
    record = provenance.record() | {
        "prompts": [{"file": path.name, "sha256": provenance.file_digest(path)} for path in options["files"]]
    }
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


@click.group(help=__doc__)
def main() -> None:
    """Command line; see the module."""


@main.command("record", help="Profile decode steps of a server with DSPARK, and summarise them.")
@click.option("--target", type=PATH, required=True)
@click.option("--draft", type=PATH, required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--config", default="auto", show_default=True, help="A policy, as in sweep_concurrency.py.")
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(1), help="Number of users.")
@click.option("--steps", default=32, show_default=True, type=click.IntRange(1), help="To be profiled.")
@click.option("--max-tokens", default=1024, show_default=True, type=click.IntRange(1), help="Of an answer.")
@click.option("--raw-prompts", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of the server, as one text.")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def record_command(**options: Any) -> None:
    """Command line; see the module."""
    try:
        trace = _record(options)
        if options["device"] == "cuda":
            _summarise([trace], options["output"] / "step.json")
    except (DSparkError, OSError) as error:
        raise click.ClickException(str(error)) from error


@main.command("summarise", help="What the steps in traces of torch.profiler are made of.")
@click.argument("traces", type=PATH, nargs=-1, required=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def summarise_command(traces: Sequence[Path], output: Path | None) -> None:
    """Command line; see the module."""
    try:
        _summarise(traces, output)
    except DSparkError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
