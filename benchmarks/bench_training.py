r"""Blocks per second of the trainer, of two checkouts in turns on the same texts.

    python benchmarks/bench_training.py --target TARGET --texts CORPUS --before OTHER_CHECKOUT \
        --output RESULTS/training_speed.json

CORPUS is a folder of texts that `python -m sglang_dspark train` or a recipe wrote (`shard-*.safetensors`). Every run is
a process: it draws a drafter of two layers, takes a few steps, and times the next ones. The target's states are
computed in every step, as by default; `--stored` takes random ones instead, so that the drafter's own work is left. The
largest memory of the process stands beside the speed.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TAPS, MASK_TOKEN = (1, 14, 27), 16
WARM_UP_STEPS = 2
TIMEOUT_S = 1800


@click.command(help=__doc__)
@click.option("--target", required=True, help="Folder of SmolLM2-135M-Instruct.")
@click.option("--texts", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Checkout to compare with.")
@click.option("--sizes", default="8x32,8x128", show_default=True, help="Texts per step x blocks per text.")
@click.option("--steps", default=6, show_default=True, help="Steps that are timed.")
@click.option("--rounds", default=3, show_default=True, help="Processes per size and checkout.")
@click.option("--stored", is_flag=True, help="Random states instead of the target's.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--child", hidden=True)
def main(  # the options of the command
    target: str,
    texts: Path,
    before: Path | None,
    sizes: str,
    steps: int,
    rounds: int,
    stored: bool,
    output: Path | None,
    child: str | None,
) -> None:
    """Command line; see the module."""
    if child is not None:
        print(json.dumps(measure(target, texts, *map(int, child.split("x")), steps, stored)))
        return
    checkouts = {"before": before.resolve(), "now": ROOT} if before else {"now": ROOT}
    results = []
    for size in sizes.split(","):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                runs[name].append(in_checkout(checkout, target, texts, size, steps, stored))
                print(size, name, runs[name][-1], flush=True)
        results.append({"size": size, "stored": stored, "runs": runs, "ratio": ratio(runs)})
        print(size, "now / before:", results[-1]["ratio"], flush=True)
    if output is not None:
        from sglang_dspark.tools import provenance

        output.parent.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output, {**provenance.record(), "results": results})


def in_checkout(checkout: Path, target: str, texts: Path, size: str, steps: int, stored: bool) -> dict[str, float]:
    """One process's measurement with the code of ``checkout``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "kernels")])}
    command = [sys.executable, __file__, "--target", target, "--texts", str(texts), "--steps", str(steps)]
    command += ["--child", size, *(["--stored"] if stored else [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(runs: dict[str, list[dict[str, float]]]) -> list[float] | None:
    """Smallest, geometric mean and largest ratio of the pairs of blocks per second; None without a checkout before."""
    if "before" not in runs:
        return None
    pairs = [now["blocks_per_s"] / then["blocks_per_s"] for then, now in zip(runs["before"], runs["now"], strict=True)]
    return [min(pairs), float(np.exp(np.mean(np.log(pairs)))), max(pairs)]


def measure(target_dir: str, texts: Path, num_rows: int, anchors: int, steps: int, stored: bool) -> dict[str, float]:
    """Take steps in this process."""
    import torch

    of = _trainer_modules()
    target = of("target").Target.from_pretrained(target_dir, TAPS, dtype=torch.bfloat16, device="cpu")
    rows = of("corpus").Corpus.load(texts, limit=1).rows[: 8 * num_rows]
    plain = [of("rows").CorpusRow(row.input_ids, row.prompt_len) for row in rows]
    sources = {}
    if stored:
        size = target.hidden_size
        plain = [
            of("rows").StoredRow(
                row.input_ids,
                row.prompt_len,
                torch.randn(len(row.input_ids) - 1, len(TAPS) * size).bfloat16(),
                torch.randn(len(row.input_ids) - 1, size).bfloat16(),
            )
            for row in plain
        ]
        sources = {"states": of("rows").stored_states}
    config = of("config").TrainConfig(
        target_layer_ids=TAPS,
        mask_token_id=MASK_TOKEN,
        # All of the shape: defaults have changed.
        block_size=5,
        num_layers=2,
        intermediate_size=1024,
        markov_rank=32,
        batch_rows=num_rows,
        anchors_per_row=anchors,
        loss_vocab=3072,
        loss_vocab_sampled=512,
        steps=10_000,
        log_every=10_000,
        checkpoint_every=10_000,
        compute_dtype="bfloat16",
    )
    corpus = of("corpus").Corpus(plain)
    with tempfile.TemporaryDirectory() as folder:
        trainer = of("trainer").Trainer(config, target, corpus, corpus, folder, **sources)
        trainer.run(until=WARM_UP_STEPS)
        started = time.perf_counter()
        trainer.run(until=WARM_UP_STEPS + steps)
        took = time.perf_counter() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"blocks_per_s": round(num_rows * anchors * steps / took, 1), "peak_mib": round(peak_mib)}


def _trainer_modules() -> Any:
    """Imports a module of the trainer, from where it is in this checkout or was in an earlier one."""
    checkout = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0])
    # An installed package stands behind the checkout: what the checkout lacks would come from there.
    package = (
        "sglang_dspark.tools.train" if (checkout / "sglang_dspark/tools/train").exists() else "sglang_dspark.train"
    )
    return lambda name: importlib.import_module(f"{package}.{name}")


if __name__ == "__main__":
    main()
