r"""What a drafter's shape costs: time to draft and to commit, for one change at a time of a given drafter.

    python benchmarks/bench_drafter_shapes.py --draft sglang_dspark/drafters/smollm2-135m-instruct \
        --sps-table benchmarks/results/sps_smollm2_cpu.json --accept-length 2.36 --output RESULTS/drafter_shapes.json

Weights are random: they do not change the time. The shapes take turns, so that a busy moment of the machine meets all
of them alike. The last columns say what a shape has to accept to serve as fast as the given drafter: its step is longer
or shorter, by what drafting and committing cost and by what verifying another number of drafts costs (from the SPS
table, extended along its last slope past the longest block in it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from dspark_kernels import RoundKeys, SamplingRows
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads, load_token_ids
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.state import DecodeBatch
from sglang_dspark.tools import provenance
from sglang_dspark.worker.drafter import Drafter

CONTEXT = 128  # tokens per request
USERS = (1, 8)
COMMITTED = 2  # tokens per request and step, about
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 2, 3, 5),
    "block_size": (3, 5, 7),
    "markov_rank": (16, 32, 64, 128, 256),
    "taps": (1, 3, 5),
    "proposed_tokens": (4096, 12_288, 49_152),
}


class TimedDrafter:
    """A drafter of some shape with random weights, and steps for it to draft and commit.

    Attributes:
        drafter: of that shape.
        samples: milliseconds by number of users.
    """

    def __init__(self, config: DraftConfig, proposed_tokens: int, dtype: torch.dtype) -> None:
        self.config, self.proposed_tokens = config, proposed_tokens
        shape = (config.vocab_size, config.hidden_size)
        model = DraftModel(config, own_embedding=False, own_lm_head=False).to(dtype)
        if model.confidence_head is not None:
            model.confidence_head.float()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding = torch.randn(shape, dtype=dtype) * 0.02
        model.freeze().bind_target(embedding, embedding)
        ids = None if proposed_tokens == config.vocab_size else list(range(proposed_tokens))
        heads, device = ProposalHeads(model, ids), torch.device("cpu")
        self.drafter = Drafter(config, model, heads, gamma=config.gamma, device=device, features=_as_given)
        self.drafter.allocate(max(USERS) * 2 * CONTEXT, dtype)
        self._steps = {users: _step(users) for users in USERS}
        self._features = {
            users: torch.randn(users * COMMITTED, config.num_taps * shape[1]).to(dtype) for users in USERS
        }
        self.samples: dict[int, list[float]] = {users: [] for users in USERS}

    def run(self, users: int) -> None:
        """Draft a whole block for ``users`` requests, and commit."""
        features = self._features[users]
        rows = torch.arange(1, len(features) + 1)
        before = time.perf_counter()
        self.drafter.propose(self._steps[users], self.config.gamma, with_confidence=True)
        self.drafter.inject(rows, features, rows, rows)
        self.samples[users].append(1e3 * (time.perf_counter() - before))

    def ms(self, users: int) -> float:
        """Median milliseconds."""
        return float(np.median(self.samples[users]))


def _as_given(input_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features


def _step(users: int) -> DecodeBatch:
    everybody = torch.arange(users)
    rows = SamplingRows.from_lists([0.0] * users, [-1] * users, [1.0] * users, [0.0] * users, [None] * users)
    lens = torch.full((users,), CONTEXT)
    return DecodeBatch(
        anchors=everybody + 1,
        prefix_lens=lens,
        req_pool_indices=everybody,
        req_to_token=torch.arange(users * 2 * CONTEXT, dtype=torch.int32).view(users, -1),
        rows=rows,
        keys=RoundKeys(0, 0, everybody, lens),
    )


def shapes(config: DraftConfig, proposed_tokens: int, dtype: torch.dtype) -> dict[tuple[str, Any], TimedDrafter]:
    """(what was changed, to what) -> drafter; the first is the unchanged one."""
    drafters = {("as given", ""): TimedDrafter(config, proposed_tokens, dtype)}
    current = {"taps": config.num_taps, "proposed_tokens": proposed_tokens} | vars(config)
    for field, values in CHANGES.items():
        for value in values:
            if value == current[field] or (field == "proposed_tokens" and value > config.vocab_size):
                continue
            if field == "proposed_tokens":
                drafters[field, value] = TimedDrafter(config, value, dtype)
                continue
            spread = np.linspace(1, config.num_target_layers - 3, value).round().astype(int) if field == "taps" else ()
            changed = {"target_layer_ids": tuple(map(int, spread))} if field == "taps" else {field: value}
            drafters[field, value] = TimedDrafter(replace(config, **changed), proposed_tokens, dtype)
    return drafters


def verify_ms(table: SpsTable, users: int, drafts: int) -> float:
    """Milliseconds to verify so many drafts per request, extended past the table's block along the slope over it."""
    row = [table.verify_ms[list(table.requests).index(users), k, 0] for k in range(table.gamma + 1)]
    slope = (row[-1] - row[1]) / (table.gamma - 1)
    return float(row[drafts] if drafts <= table.gamma else row[-1] + slope * (drafts - table.gamma))


@click.command(help=__doc__)
@click.option("--draft", required=True, type=click.Path(exists=True, path_type=Path), help="Drafter to vary.")
@click.option("--sps-table", required=True, type=click.Path(exists=True, path_type=Path), help="Of its server here.")
@click.option("--accept-length", required=True, type=float, help="Of the drafter as given.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--repeats", default=60, show_default=True, help="Steps per shape and number of users.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@torch.inference_mode()
def main(draft: Path, sps_table: Path, accept_length: float, dtype: str, repeats: int, output: Path | None) -> None:
    """Command line; see the module."""
    config, times = read_config(draft), SpsTable.load(sps_table)
    ids = load_token_ids(draft, config.vocab_size)
    drafters = shapes(config, config.vocab_size if ids is None else len(ids), getattr(torch, dtype))
    for _ in track(range(3 + repeats), description="drafting"):
        for drafter in drafters.values():
            for users in USERS:
                drafter.run(users)
    records = []
    given_ms = None
    for (field, value), drafter in drafters.items():
        for users in USERS:
            del drafter.samples[users][:3]
        step_ms = {u: drafter.ms(u) + verify_ms(times, u, drafter.config.gamma) for u in USERS}
        given_ms = given_ms or step_ms
        records.append(
            {
                "change": field,
                "value": value,
                "parameters": drafter.parameters,
                "draft_and_commit_ms": {u: round(drafter.ms(u), 3) for u in USERS},
                "quartiles_ms": {u: np.percentile(drafter.samples[u], [25, 75]).round(3).tolist() for u in USERS},
                "step_ms": {u: round(step_ms[u], 2) for u in USERS},
                "break_even_accept_length": {u: round(accept_length * step_ms[u] / given_ms[u], 3) for u in USERS},
            }
        )
    Console().print(result_table(records))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **provenance.record(),
            "draft": provenance.portable(str(draft)),
            "accept_length": accept_length,
            "shapes": records,
        }
        provenance.write_json(output, document)


def result_table(records: list[dict[str, Any]]) -> Table:
    """Records for the terminal."""
    table = Table()
    for name in ("shape", "million weights", *(f"draft ms, {u} users" for u in USERS)):
        table.add_column(name, justify="left" if name == "shape" else "right")
    for users in USERS:
        table.add_column(f"breaks even at, {users} users", justify="right")
    for record in records:
        table.add_row(
            f"{record['change']} {record['value']}",
            f"{record['parameters'] / 1e6:.1f}",
            *(f"{record['draft_and_commit_ms'][u]:.2f}" for u in USERS),
            *(f"{record['break_even_accept_length'][u]:.2f}" for u in USERS),
        )
    return table


if __name__ == "__main__":
    main()
