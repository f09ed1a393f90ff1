"""A drafter by what its folder says, read once and handed on to whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.reduced_vocabulary import load_token_ids


@dataclass(frozen=True)
class ResolvedDrafter:
    """A checked draft checkpoint but for its tensors.

    Attributes:
        path: its folder.
        config: its ``config.json``.
        token_ids: tokens that it proposes, ascending; None for the whole vocabulary.
    """

    path: str
    config: DraftConfig
    token_ids: list[int] | None

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the small files of a checkpoint.

        Raises:
            CheckpointError: one of them is missing, damaged or unsupported.
        """
        config = DraftConfig.from_pretrained(path)
        return cls(str(path), config, load_token_ids(path, config.vocab_size))
