"""A drafter by what its folder says, read once and handed on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import Reading, read
from sglang_dspark.draft.reduced_vocabulary import load_token_ids


@dataclass(frozen=True)
class ResolvedDrafter:
    """A checked draft checkpoint but for its tensors.

    Attributes:
        path: its folder.
        reading: its format and its configuration.
        token_ids: tokens that it proposes, ascending; None if no file beside the checkpoint lists them.
    """

    path: str
    reading: Reading
    token_ids: list[int] | None

    @property
    def config(self) -> DraftConfig:
        """Return the configuration, whatever the format."""
        return self.reading.config

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the small files of a checkpoint, and the names and shapes of its tensors, or raise CheckpointError."""
        reading = read(path)
        return cls(str(path), reading, load_token_ids(path, reading.config.vocab_size))
