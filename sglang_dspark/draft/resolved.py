"""A drafter by what its folder says, read once and handed on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import Reading, read
from sglang_dspark.draft.reduced_vocabulary import load_token_ids, read_token_ids
from sglang_dspark.errors import CheckpointError


@dataclass(frozen=True)
class ResolvedDrafter:
    """A checked draft checkpoint but for its tensors.

    Attributes:
        path: its folder.
        reading: its format and its configuration.
        token_ids: tokens that it proposes, ascending; None if no file lists them.
        is_listed: whether an operator has listed them.
    """

    path: str
    reading: Reading
    token_ids: list[int] | None
    is_listed: bool = False

    @property
    def config(self) -> DraftConfig:
        """Return the configuration, whatever the format."""
        return self.reading.config

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the small files of a checkpoint, and the names and shapes of its tensors, or raise CheckpointError."""
        reading = read(path)
        return cls(str(path), reading, load_token_ids(path, reading.config.vocab_size))

    def proposing(self, path: str | Path) -> Self:
        """Return the drafter with the tokens that the file at ``path`` lists, in place of a list beside it.

        Raises:
            CheckpointError: the file cannot be read, or the drafter has heads for some tokens alone.
        """
        if (own := self.config.draft_vocab_size) is not None:
            raise CheckpointError(f"{self.path} has heads for the {own} tokens that it was trained for, and no others")
        return replace(self, token_ids=read_token_ids(Path(path), self.config.vocab_size), is_listed=True)

    def with_its_list(self, other: Self) -> Self:
        """Return another drafter, with the tokens that an operator has listed for this one."""
        return replace(other, token_ids=self.token_ids, is_listed=True) if self.is_listed else other

    @property
    def num_proposed(self) -> int:
        """Return the number of tokens that it proposes."""
        return self.config.num_proposed if self.token_ids is None else len(self.token_ids)
