"""Measure what draft trees would bring over chains: accepted drafts on a real pair, and throughput by step times.

    python benchmarks/trees.py --target T --draft D --prompts gsm8k.jsonl --steps float32=sps.json --output FILE

A tree adds to the chain of a block, for each of its slots, the drafter's two next best tokens, and what the Markov head
drafts after the better one. Its nodes are ranked by the probability that the target takes their path, which half of the
texts teach; the other half is decoded. A path goes on in a sibling whose token the target wrote in place of a rejected
draft, so outputs keep the target's distribution. Decoding is replayed as :mod:`dspark_training.replay` does it.

Throughputs are upper bounds: planning, masks and the commit of a path cost nothing. Only the second walk of the Markov
head does, whose time is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from dspark_kernels import MarkovWalk, block_confidence
from dspark_training.block_forward import block_hidden, context_kv
from dspark_training.prompt_format import PromptFormat
from dspark_training.target import Target
from dspark_training.texts import StoredText, keep_states
from dspark_training.writers import InProcessWriter
from numpy.typing import NDArray

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.draft.weights import ResolvedDrafter, load_draft_model
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.prompts import read_prompts

Floats = NDArray[np.float64]

MARGINS = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Bins of how far a runner-up's logit is from the best one's."""
CONFIDENCES = np.linspace(0.0, 1.0, 13)[1:-1]
"""Bins of the confidence head's and the Markov head's probabilities."""
SIBLINGS = 2
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 16, 21, 25)
"""Nodes of the trees whose accept length is reported."""
USERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Blocks:
    """Draft blocks at all positions of some texts, and what the target wrote there.

    Attributes:
        text: [n] number of the text.
        taken: [n, gamma] whether the target takes the draft of a slot, if it took those before it.
        sibling: [n, gamma, SIBLINGS] whether it takes the sibling instead, if it rejects the draft.
        later: [n, gamma, gamma] whether it takes the token that is drafted for a later slot after the first sibling.
        confidence: [n, gamma] of the confidence head.
        margin: [n, gamma, SIBLINGS] of the siblings' logits.
        sureness: [n, gamma, gamma] probabilities of what is drafted after a sibling.
    """

    text: NDArray[np.int64]
    taken: NDArray[np.bool_]
    sibling: NDArray[np.bool_]
    later: NDArray[np.bool_]
    confidence: Floats
    margin: Floats
    sureness: Floats

    @property
    def gamma(self) -> int:
        """Return the drafts of a block."""
        return self.taken.shape[1]


# ---- blocks of a real pair


class Drafting:
    """Drafts blocks with siblings at all positions of texts."""

    def __init__(self, model: DraftModel, heads: ProposalHeads, target: Target, temperature: float) -> None:
        self._model, self._heads, self._target, self._temperature = model, heads, target, temperature
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def blocks(self, texts: Sequence[StoredText]) -> Blocks:
        """Return the blocks of all positions of which the target wrote all that a block may draft."""
        found: list[dict[str, torch.Tensor]] = []
        for number, text in enumerate(texts):
            k, v = context_kv(self._model, text.features[None].float())
            for anchor in range(text.prompt_len, len(text.input_ids) - 1 - self._model.config.gamma):
                block = self._block(text, anchor, k, v)
                found.append({"text": torch.tensor(number), **block})
        return Blocks(**{name: torch.stack([block[name] for block in found]).numpy() for name in found[0]})

    def _block(self, text: StoredText, anchor: int, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        gamma, first = self._model.config.gamma, text.input_ids[anchor][None]
        labels = text.input_ids[anchor + 1 : anchor + 1 + gamma]
        hidden = block_hidden(self._model, k, v, torch.tensor([[anchor]]), first[None])[:, 0]
        base = self._heads.base_logits(hidden)
        assert self._heads.weights.markov is not None, "siblings come from the Markov head"
        assert self._heads.weights.confidence is not None, "nodes are ranked by the confidence head"
        walk = MarkovWalk(self._heads.weights.markov, hidden)

        def law(token: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Return logits [vocabulary] of a slot after a token, and their probabilities."""
            logits = walk.corrected(token[None], base[:, slot], None)
            logits = logits if self._heads.vocabulary is None else self._heads.vocabulary.spread(logits)
            return logits[0].float(), torch.softmax(logits[0].float(), dim=-1)

        drafts, on_path = [first[0]], True
        taken, sibling = torch.zeros(gamma, dtype=torch.bool), torch.zeros(gamma, SIBLINGS, dtype=torch.bool)
        later, sureness = torch.zeros(gamma, gamma, dtype=torch.bool), torch.zeros(gamma, gamma)
        margin = torch.zeros(gamma, SIBLINGS)
        for slot in range(gamma):
            logits, proposed = law(drafts[-1], slot)
            draft, taken[slot] = self._draft(text, anchor + slot, labels[slot], proposed, on_path=on_path)
            on_path = on_path and bool(taken[slot])
            best = logits.topk(SIBLINGS + 1).indices
            margin[slot] = logits[best[0]] - logits[best[1:]]
            others = best[best != draft][:SIBLINGS]
            sibling[slot] = others == labels[slot]
            drafts.append(draft)
            last = others[0]
            for place in range(slot + 1, gamma):
                probabilities = law(last, place)[1]
                last = probabilities.argmax()
                later[slot, place], sureness[slot, place] = last == labels[place], probabilities[last]
        confidence = block_confidence(
            hidden, first, torch.stack(drafts[1:])[None], self._heads.weights.confidence, self._heads.weights.w1
        )
        return {
            "taken": taken,
            "sibling": sibling,
            "later": later,
            "confidence": torch.sigmoid(confidence[0]).double(),
            "margin": margin.double(),
            "sureness": sureness.double(),
        }

    def _draft(
        self, text: StoredText, place: int, label: torch.Tensor, proposed: torch.Tensor, *, on_path: bool
    ) -> tuple[torch.Tensor, bool]:
        """Return a draft, and whether the target takes it given that it wrote ``label``.

        Of a text that was sampled, ``min(1, p_d / p_t)`` of the label was an accepted draft. Otherwise what was drafted
        was rejected, so it comes from what p_d has above p_t.
        """
        if self._temperature == 0:
            draft = proposed.argmax()
            return draft, bool(draft == label)
        if not on_path:
            return torch.multinomial(proposed, 1, generator=self._generator)[0], False
        wanted = torch.softmax(self._target.logits(text.last_hidden[place][None])[0].float(), dim=-1)
        if torch.rand((), generator=self._generator) < proposed[label] / wanted[label]:
            return label, True
        rejected = (proposed - wanted).clamp(min=0)
        return torch.multinomial(rejected, 1, generator=self._generator)[0], False


# ---- trees


class Trees:
    """Ranks the nodes of blocks by the probability that the target takes their paths, as half of the texts teach it."""

    def __init__(self, blocks: Blocks) -> None:
        gamma = blocks.gamma
        accepted, seen = np.zeros((gamma, len(CONFIDENCES) + 1)), np.zeros((gamma, len(CONFIDENCES) + 1))
        right, missed = np.zeros((SIBLINGS, len(MARGINS) + 1)), np.zeros((SIBLINGS, len(MARGINS) + 1))
        went_on, tried = np.zeros(len(CONFIDENCES) + 1), np.zeros(len(CONFIDENCES) + 1)
        self.runner_up, self.after_it = np.zeros(2), np.zeros(2)
        for block in np.flatnonzero(blocks.text % 2 == 0):
            for slot in range(gamma):
                place = slot, np.digitize(blocks.confidence[block, slot], CONFIDENCES)
                seen[place] += 1
                if blocks.taken[block, slot]:
                    accepted[place] += 1
                    continue
                hits = blocks.sibling[block, slot]
                for rank in range(SIBLINGS):
                    bucket = rank, np.digitize(blocks.margin[block, slot, rank], MARGINS)
                    missed[bucket] += 1
                    right[bucket] += hits[rank]
                self.runner_up += hits[0], 1
                for later in range(slot + 1, gamma) if hits[0] else ():
                    bucket = np.digitize(blocks.sureness[block, slot, later], CONFIDENCES)
                    tried[bucket] += 1
                    went_on[bucket] += blocks.later[block, slot, later]
                    self.after_it += blocks.later[block, slot, later], 1
                    if not blocks.later[block, slot, later]:
                        break
                break
        middles = (np.arange(len(CONFIDENCES) + 1) + 0.5) / (len(CONFIDENCES) + 1)
        self._conditional = (accepted + 5 * middles) / (seen + 5)
        self._right = (right + 1) / (missed + 4)
        self._goes_on = (went_on + 1) / (tried + 2)

    def nodes(self, blocks: Blocks, block: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return keys and nodes, the best first: (slot,) of a draft, (slot, rank) of a sibling, (slot, 0, later slot).

        A sibling's key is at most that of the draft next to it, so that it never displaces it.
        """
        found: list[tuple[float, tuple[int, ...]]] = []
        before = 1.0
        for slot in range(blocks.gamma):
            conditional = self._conditional[slot, np.digitize(blocks.confidence[block, slot], CONFIDENCES)]
            found.append((before * conditional, (slot,)))
            for rank in range(SIBLINGS):
                hit = self._right[rank, np.digitize(blocks.margin[block, slot, rank], MARGINS)]
                key = min(before * conditional, before * (1 - conditional) * hit)
                found.append((key, (slot, rank)))
                for later in range(slot + 1, blocks.gamma) if rank == 0 else ():
                    key *= self._goes_on[np.digitize(blocks.sureness[block, slot, later], CONFIDENCES)]
                    found.append((key, (slot, 0, later)))
            before *= conditional
        return sorted(found, key=lambda node: (-node[0], len(node[1]), node[1]))


def accepted(blocks: Blocks, block: int, nodes: set[tuple[int, ...]]) -> int:
    """Return how many drafts of a tree the target takes."""
    for slot in range(blocks.gamma):
        if (slot,) in nodes and blocks.taken[block, slot]:
            continue
        ranks = [rank for rank in range(SIBLINGS) if (slot, rank) in nodes and blocks.sibling[block, slot, rank]]
        if not ranks or blocks.taken[block, slot]:
            return slot
        later = slot + 1
        while ranks == [0] and (slot, 0, later) in nodes and blocks.later[block, slot, later]:
            later += 1
        return later
    return blocks.gamma


class Decoding:
    """Replays the decoding of the texts that taught nothing."""

    def __init__(self, blocks: Blocks, trees: Trees) -> None:
        self._blocks = blocks
        self._texts = [np.flatnonzero(blocks.text == text) for text in np.unique(blocks.text) if text % 2]
        ranked = {block: trees.nodes(blocks, block) for text in self._texts for block in text.tolist()}
        chains = {block: [node for node in nodes if len(node[1]) == 1] for block, nodes in ranked.items()}
        self._ranked = {True: ranked, False: chains}

    def accept_length(self, size: int, *, trees: bool) -> float:
        """Return the tokens per step with so many nodes in each."""
        lengths = []
        for text in self._texts:
            place = 0
            while place < len(text):
                block = int(text[place])
                nodes = {node for _, node in self._ranked[trees][block][:size]}
                lengths.append(1 + accepted(self._blocks, block, nodes))
                place += lengths[-1]
        return float(np.mean(lengths))

    def throughput(self, times: StepTimes, users: int, *, trees: bool) -> tuple[float, float]:
        """Return tokens per ms of so many users, and nodes per request, if each step has the nodes that pay most.

        Args:
            trees: whether a step may have them; it has chains where these are expected to bring more per ms.
        """
        stream = self._endless()
        places = [next(stream) for _ in range(users)]
        num_steps = max(200, 4000 // users)
        tokens = ms = nodes = 0.0
        for _ in range(num_steps):
            blocks = [int(text[place]) for text, place in places]
            choices = [self._best(blocks, times, trees=kind) for kind in ((False, True) if trees else (False,))]
            _, cost, chosen = max(choices, key=lambda choice: choice[0])
            for user, (text, place) in enumerate(places):
                committed = 1 + accepted(self._blocks, blocks[user], set(chosen[user]))
                tokens += committed
                places[user] = (text, place + committed) if place + committed < len(text) else next(stream)
            ms, nodes = ms + cost, nodes + sum(map(len, chosen)) / users
        return tokens / ms, nodes / num_steps

    def _best(
        self, blocks: Sequence[int], times: StepTimes, *, trees: bool
    ) -> tuple[float, float, list[list[tuple[int, ...]]]]:
        """Return the most tokens per ms that one kind of nodes is expected to bring, the step's ms, and these nodes."""
        ranked, users = [self._ranked[trees][block] for block in blocks], len(blocks)
        keys = np.array([key for mine in ranked for key, _ in mine])
        owners = np.repeat(np.arange(users), [len(mine) for mine in ranked])
        order = np.argsort(-keys, kind="stable")
        costs = times.of(users, trees=trees)[: len(keys) + 1]
        speeds = (users + np.concatenate([[0.0], keys[order].cumsum()])) / costs
        best = int(np.argmax(speeds))
        sizes = np.bincount(owners[order[:best]], minlength=users)
        chosen = [[node for _, node in mine[:size]] for mine, size in zip(ranked, sizes, strict=True)]
        return float(speeds[best]), float(costs[best]), chosen

    def _endless(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield the texts from their beginnings, over and over."""
        while True:
            for text in self._texts:
                yield text, 0


# ---- step times


class StepTimes:
    """Step times by rows, from a table that a server measured or that was derived from one.

    Attributes:
        walk_ms: of the second walk of the Markov head.
        most_users: of whose steps the table knows.
    """

    def __init__(self, table: SpsTable, walk_ms: float) -> None:
        self.walk_ms, self.most_users = walk_ms, table.requests[-1]
        points: dict[int, float] = {}
        for requests, times in zip(table.requests, table.verify_ms, strict=True):
            for drafts, ms in zip(table.drafts, times[:, 0], strict=True):
                points[requests * (1 + drafts)] = max(float(ms), points.get(requests * (1 + drafts), 0.0))
        self._rows, self._verify = (
            np.array(column, dtype=float) for column in zip(*sorted(points.items()), strict=True)
        )
        self._requests, self._draft = table.requests, table.draft_ms[:, -1, 0]

    @cache  # noqa: B019 - a few objects that live as long as the program
    def of(self, users: int, *, trees: bool) -> Floats:
        """Return the milliseconds of a step of so many users with 0, 1, 2, ... nodes in all."""
        drafting = float(np.interp(users, self._requests, self._draft)) + (self.walk_ms if trees else 0.0)
        rows = np.arange(users, users * (1 + SIZES[-1]) + 1)
        slope = (self._verify[-1] - self._verify[-2]) / (self._rows[-1] - self._rows[-2])
        beyond = slope * np.maximum(rows - self._rows[-1], 0.0)
        return np.interp(rows, self._rows, self._verify) + beyond + np.where(rows > users, drafting, 0.0)


def _ratios(decoding: Decoding, times: StepTimes) -> dict[str, dict[str, float]]:
    """Return for each number of users the throughput with trees over that with chains, and nodes per request."""
    found = {}
    for users in USERS:
        if users > times.most_users:
            break
        chains, drafts = decoding.throughput(times, users, trees=False)
        trees, nodes = decoding.throughput(times, users, trees=True)
        found[str(users)] = {"ratio": round(trees / chains, 3), "drafts": round(drafts, 1), "nodes": round(nodes, 1)}
    return found


def _collected(
    folder: Path, draft: Path, files: Sequence[Path], limit: int, max_tokens: int
) -> Iterator[tuple[str, float, Blocks]]:
    """Yield the blocks of each set of prompts at temperature 0 and 1."""
    drafter = ResolvedDrafter.read(draft)
    target = Target.from_pretrained(folder, drafter.config.target_layer_ids, dtype=torch.float32, device="cpu")
    model = load_draft_model(draft, dtype=torch.float32, device="cpu", reading=drafter.reading)
    model.bind_target(target.embed_weight, target.lm_head_weight, embed_scale=target.embed_scale)
    heads = ProposalHeads(model, drafter.token_ids)
    form, writer = PromptFormat.from_pretrained(folder), InProcessWriter(target)
    for file in files:
        prompts = [form.encode(prompt) for prompt in read_prompts(file, limit)]
        for temperature in (0.0, 1.0):
            texts = writer.write(prompts, [temperature] * len(prompts), max_tokens + model.config.gamma + 1, 0)
            stored = [text for text in keep_states(target, texts, batch_tokens=4096) if isinstance(text, StoredText)]
            yield file.stem, temperature, Drafting(model, heads, target, temperature).blocks(stored)


@click.command()
@click.option("--target", type=Path, required=True)
@click.option("--draft", type=Path, required=True)
@click.option("--prompts", "files", type=Path, multiple=True, required=True)
@click.option("--limit", default=40, show_default=True, help="prompts of each file")
@click.option("--max-tokens", default=128, show_default=True, help="of each answer")
@click.option("--steps", "tables", multiple=True, help="NAME:MS=FILE, step times and the time of the second walk")
@click.option("--output", type=Path, required=True)
def main(
    target: Path, draft: Path, files: Sequence[Path], limit: int, max_tokens: int, tables: Sequence[str], output: Path
) -> None:
    """Measure accept lengths of trees, and bounds of what they bring at measured step times."""
    machines = {}
    for given in tables:
        name, file = given.split("=", 1)
        name, walk_ms = name.split(":", 1)
        machines[name] = StepTimes(SpsTable.load(Path(file)), float(walk_ms))
    sets: list[dict[str, Any]] = []
    for name, temperature, blocks in _collected(target, draft, files, limit, max_tokens):
        trees = Trees(blocks)
        decoding = Decoding(blocks, trees)
        whole = decoding.accept_length(blocks.gamma, trees=False)
        sizes = [size for size in SIZES if size <= len(trees.nodes(blocks, 0))]
        sets.append(
            {
                "prompts": name,
                "temperature": temperature,
                "blocks": len(blocks.text),
                "runner_up_right": round(float(trees.runner_up[0] / max(1, trees.runner_up[1])), 3),
                "right_after_it": round(float(trees.after_it[0] / max(1, trees.after_it[1])), 3),
                "chain": round(whole, 3),
                "over_chain": {str(size): round(decoding.accept_length(size, trees=True) / whole, 3) for size in sizes},
                "throughput": {name: _ratios(decoding, times) for name, times in machines.items()},
            }
        )
        click.echo(json.dumps(sets[-1]))
    walks = {name: times.walk_ms for name, times in machines.items()}
    provenance.write_json(output, {**provenance.record(), "gamma": blocks.gamma, "walk_ms": walks, "sets": sets})


if __name__ == "__main__":
    main()
