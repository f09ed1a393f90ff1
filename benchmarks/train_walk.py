r"""docs/training.md followed to the end for another target on a CPU, with the time of every step.

    python benchmarks/train_walk.py --target TARGET --prompts PROMPTS.jsonl --output FOLDER --result RESULT.json

Every step is a command of that page, run as a user would run it: train, check the pair, serve it with whole blocks,
measure and calibrate, then serve it as one would from then on and ask a question. The first prompts are trained on, and
the others measure. What a command printed is in FOLDER; one that fails ends the walk with its last lines.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import lines_of
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

# The options of "On a CPU" in docs/training.md; the number of invented prompts stands apart.
CPU_OPTIONS = (
    "--dtype bfloat16 --store-states --max-tokens 160 --write-batch 96 --block-size 5 --layers 2 --rank 32 "
    "--loss-vocab 3072 --batch-rows 4 --learning-rate 1e-3"
)
_TAIL_LINES = 20
# Of what `evaluate` found.
_SERVED = ("answers", "output_tokens", "rounds", "block_size", "accept_length", "standard_error", "survival")


class Walk:
    """The steps taken so far: what was run, and how long it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []

    def run(self, name: str, *arguments: str) -> None:
        """Run ``python -m sglang_dspark`` with these arguments.

        Raises:
            DSparkError: it failed.
        """
        words = ["-m", "sglang_dspark", *arguments]
        log = self.folder / f"{name}.log"
        started = time.perf_counter()
        with log.open("w", encoding="utf-8") as output:
            status = subprocess.run(
                [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        self._took(name, shlex.join(["python", *map(provenance.portable, words)]), started)
        if status:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-_TAIL_LINES:])
            raise DSparkError(f"{name} failed with status {status}; {log} ends\n{tail}")

    @contextmanager
    def serve(self, name: str, target: str, *flags: str) -> Iterator[LaunchedServer]:
        """A server of the target on this CPU; what is timed is its start."""
        started = time.perf_counter()
        log_path = self.folder / f"{name}.log"
        with LaunchedServer(target, *CPU_FLAGS, *flags, env=CPU_ENV, log_path=log_path) as server:
            words = ["python", "-m", "sglang.launch_server", "--model-path", target, *CPU_FLAGS, *flags]
            self._took(name, shlex.join(map(provenance.portable, words)), started)
            yield server

    def _took(self, name: str, command: str, started: float) -> None:
        seconds = round(time.perf_counter() - started, 1)
        self.steps.append({"step": name, "command": command, "seconds": seconds})
        click.echo(f"{name}: {seconds} s")


def split_prompts(path: Path, folder: Path, num_trained: int, num_measured: int) -> tuple[Path, Path]:
    """Two files in `folder`: the first prompts of `path`, and those behind them.

    Raises:
        DSparkError: there are not so many.
    """
    lines = list(lines_of(path.read_text(encoding="utf-8")))
    if len(lines) < num_trained + num_measured:
        raise DSparkError(f"--prompts {path}: {len(lines)} prompts; give {num_trained + num_measured} or more")
    parts = {"trained": lines[:num_trained], "measured": lines[num_trained : num_trained + num_measured]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in part), encoding="utf-8")
    return folder / "trained.jsonl", folder / "measured.jsonl"


def stages_of(run: Path, started: float, ended: float) -> dict[str, float]:
    """Seconds of the stages of a training command that ran from `started` to `ended`, by the files that it wrote."""
    written = max(path.stat().st_mtime for path in (run / "corpus").rglob("shard-*.safetensors"))
    trained = (run / "training_state.pt").stat().st_mtime
    return {
        "texts": round(written - started, 1),
        "training": round(trained - written, 1),
        "measuring": round(ended - trained, 1),
    }


def follow(
    walk: Walk, target: str, prompts: Sequence[Path], options: Sequence[str], raw: Sequence[str]
) -> Mapping[str, Any]:
    """Take all steps; what came out of them."""
    trained, measured = prompts
    run = walk.folder / "run"
    draft = str(run / "draft")
    started = time.time()
    walk.run("train", "train", "--target", target, "--output", str(run), "--prompts", str(trained), *raw, *options)
    stages = stages_of(run, started, time.time())
    walk.run("doctor", "doctor", "--target", target, "--draft", draft)
    speculating = ("--dtype", "bfloat16", *dspark_flags(draft))
    sts, results = walk.folder / "sts.json", walk.folder / "served.json"
    with_url = ("--prompts", str(measured), *raw)
    with walk.serve("serve whole blocks", target, *speculating, "--speculative-dspark-schedule", "static") as server:
        walk.run("evaluate", "evaluate", "--url", server.url, *with_url, "--output", str(results))
        walk.run("calibrate", "calibrate", "--url", server.url, *with_url, "--output", str(sts))
    with walk.serve("serve", target, *speculating, "--speculative-dspark-confidence-sts-path", str(sts)) as server:
        answer = server.post_json("/v1/completions", {"model": "", "prompt": "Two and two", "max_tokens": 48})
        stats = server.get_json("/dspark/stats")
    held_out = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    served = json.loads(results.read_text(encoding="utf-8"))["results"][0]
    return {
        "stages": stages,
        "held_out": {name: value for name, value in held_out.items() if name != "target"},
        "served": {name: served[name] for name in _SERVED},
        "calibration": json.loads(sts.read_text(encoding="utf-8")),
        "answer": answer["choices"][0]["text"],
        "answered_with": {name: stats[name] for name in ("policy", "rounds", "verified_tokens", "accepted_tokens")},
    }


@click.command(help=__doc__)
@click.option("--target", required=True, help="Folder of the target.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True, help="JSONL.")
@click.option("--trained", default=400, show_default=True, help="Prompts to train on.")
@click.option("--measured", default=40, show_default=True, help="Prompts to measure and to calibrate on.")
@click.option("--options", default=CPU_OPTIONS, show_default=True, help="Of `train`, in one string.")
@click.option("--raw", is_flag=True, help="The target has no chat template.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of everything that is made.")
@click.option("--result", type=click.Path(path_type=Path), required=True, help="JSON file.")
def main(
    target: str, prompts: Path, trained: int, measured: int, options: str, raw: bool, output: Path, result: Path
) -> None:
    """See the module's docstring."""
    output.mkdir(parents=True, exist_ok=True)
    walk = Walk(output)
    files = split_prompts(prompts, output, trained, measured)
    started = time.perf_counter()
    found: Mapping[str, Any] = {}
    try:
        found = follow(walk, target, files, shlex.split(options), ("--raw",) if raw else ())
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    finally:  # of a walk that was cut short, the steps that it took
        total = round(time.perf_counter() - started, 1)
        provenance.write_json(result, {**provenance.record(), "seconds": total, "steps": walk.steps, **found})
        click.echo(f"{result}: {total} s in all")


if __name__ == "__main__":
    main()
