"""Lay prompts out as requests of a verification, which have a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Blocks:
    """The rows of prompts, cut into blocks: the first row of each is an anchor, those behind are its drafts.

    A layer stores the K/V of all rows before any of them attends, so the rows of a block see those of the blocks
    before, as the context that they continue.

    Attributes:
        width: the most rows of a block.
        owners: prompt of each block.
        contexts: tokens before each block.
        firsts: its first row among all rows.
        lens: its rows.
        lasts: last row of each prompt.
    """

    width: int
    owners: list[int]
    contexts: list[int]
    firsts: list[int]
    lens: list[int]
    lasts: list[int]

    @classmethod
    def of(cls, rows: Sequence[int], contexts: Sequence[int], width: int) -> Blocks:
        """Cut prompts of so many ``rows`` behind so many tokens of ``contexts``."""
        blocks, end = cls(width, [], [], [], [], []), 0
        for prompt, (num, context) in enumerate(zip(rows, contexts, strict=True)):
            for begin in range(0, num, width):
                blocks.owners.append(prompt)
                blocks.contexts.append(context + begin)
                blocks.firsts.append(end + begin)
                blocks.lens.append(min(width, num - begin))
            end += num
            blocks.lasts.append(end - 1)
        return blocks

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return sum(self.lens)

    @cached_property
    def index(self) -> torch.Tensor:
        """Return [blocks, width] int64, the rows of each block; behind its last one stand others, which do not count."""
        index = torch.tensor(self.firsts)[:, None] + torch.arange(self.width)
        return index.clamp_max(self.rows - 1)

    @property
    def order(self) -> torch.Tensor:
        """Return [blocks, width - 1] float32 what the drafts rank by: 1, or -1 behind the block's last row."""
        is_row = torch.arange(1, self.width) < torch.tensor(self.lens)[:, None]
        return torch.where(is_row, 1.0, -1.0)
