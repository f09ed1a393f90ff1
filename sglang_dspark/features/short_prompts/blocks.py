"""Lay prompts out as requests of a verification, which have a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """The rows of prompts, cut into blocks: the first row of each is an anchor, those behind are its drafts.

    A layer stores the K/V of all rows before any of them attends, so the rows of a block see those of the blocks
    before, as the context that they continue.

    Attributes:
        owners: prompt of each block.
        contexts: tokens before each block.
        anchors: its first row among all rows.
        drafts: the width - 1 rows behind the anchor of each block in turn; behind its last one stands that one again.
        ranks: what these rank by: 1, or -1 where they do not count.
        lasts: last row of each prompt.
    """

    owners: list[int]
    contexts: list[int]
    anchors: list[int]
    drafts: list[int]
    ranks: list[float]
    lasts: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], contexts: Sequence[int], width: int) -> Blocks:
        """Cut prompts of these lengths, each of which goes on behind so many tokens of ``contexts``.

        Args:
            width: the most rows of a block.
        """
        blocks, end = cls([], [], [], [], [], []), 0
        for prompt, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
            for begin in range(0, length, width):
                anchor, drafts = end + begin, min(width, length - begin) - 1
                blocks.owners.append(prompt)
                blocks.contexts.append(context + begin)
                blocks.anchors.append(anchor)
                blocks.drafts.extend(anchor + min(column, drafts) for column in range(1, width))
                blocks.ranks.extend([1.0] * drafts + [-1.0] * (width - 1 - drafts))
            end += length
            blocks.lasts.append(end - 1)
        return blocks

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_rows(self) -> int:
        """Return how many rows count."""
        return self.lasts[-1] + 1
