"""Which texts and anchors a step has, and which process reads which of them.

Everything follows from (seed, step) alone, and every process draws all of it: so each knows what the others do, and
what a step learns depends neither on their number nor on how many texts go through the drafter together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.tools.train.anchors import sample_anchors
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.corpus import Corpus
from sglang_dspark.tools.train.rows import CorpusRow


@dataclass(frozen=True)
class Piece:
    """Texts that go through target and drafter together, with their anchors."""

    rows: list[CorpusRow]
    anchors: list[Tensor]


class Batches:
    """The steps of a run over a corpus."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self._config, self._corpus = config, corpus
        self._epoch, self._order = -1, torch.empty(0)

    def step(self, step: int) -> Piece:
        """All texts of a step: in an order that is shuffled anew each epoch, with fresh anchors each time."""
        size, num_rows = self._config.batch_rows, len(self._corpus)
        rows = []
        for position in range(step * size, (step + 1) * size):
            epoch, offset = divmod(position, num_rows)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = torch.randperm(num_rows, generator=seeded(self._config.seed, "epoch", epoch))
            rows.append(self._corpus.rows[self._order[offset]])
        return self._with_anchors(rows, "anchors", step)

    def all(self) -> Piece:
        """The whole corpus, with the same anchors every time."""
        return self._with_anchors(self._corpus.rows, "held-out", 0)

    def _with_anchors(self, rows: list[CorpusRow], purpose: str, index: int) -> Piece:
        generator = seeded(self._config.seed, purpose, index)
        return Piece(rows, [sample_anchors(row, self._config.anchors_per_row, generator) for row in rows])


def pieces_of(whole: Piece, most_rows: int, rank: int, count: int) -> Iterator[Piece]:
    """The pieces that one of ``count`` processes reads: texts of similar length, so that little of a piece is padding.

    Pieces are dealt out to and fro, so that no process has the longest texts of every step.

    Args:
        most_rows: texts of a piece at most.
    """
    order = sorted(range(len(whole.rows)), key=lambda i: len(whole.rows[i].input_ids))
    number = _num_pieces(len(order), most_rows, count)
    for turn in range(number // count):
        index = turn * count + (rank if turn % 2 == 0 else count - 1 - rank)
        chosen = order[index * len(order) // number : (index + 1) * len(order) // number]
        if chosen:
            yield Piece([whole.rows[i] for i in chosen], [whole.anchors[i] for i in chosen])


def rows_of_piece(num_rows: int, most_rows: int, count: int) -> int:
    """The most texts that go through the drafter together."""
    return math.ceil(num_rows / _num_pieces(num_rows, most_rows, count))


def _num_pieces(num_rows: int, most_rows: int, count: int) -> int:
    """As many for each process; of several, each has two where there are texts for them."""
    fewest = 1 if count == 1 else min(2, num_rows // count)
    return count * max(fewest, math.ceil(num_rows / (count * most_rows)))


def supervised_slots(piece: Piece, gamma: int) -> Tensor:
    """How many slots at each position of their blocks have a label: ``[gamma]``."""
    rows = zip(piece.rows, piece.anchors, strict=True)
    inside = [(len(row.input_ids) - 1 - anchors).clamp(max=gamma) for row, anchors in rows]
    return (torch.cat(inside)[:, None] > torch.arange(gamma)).sum(0)


def seeded(seed: int, purpose: str, index: int) -> torch.Generator:
    """An independent stream for each (seed, purpose, index)."""
    key = int.from_bytes(f"{purpose}/{index}".encode(), "big") % (2**61 - 1)
    return torch.Generator().manual_seed((seed * 1_000_003 + key) % 2**63)
