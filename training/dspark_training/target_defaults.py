"""Choose taps, depth and mask token of a drafter from its target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dspark.errors import ConfigError

_NUM_TAPS = 5
# Layers of the target per layer of the drafter, and the most of them: DeepSpec gives 36 and 40 layers a drafter of 5.
_LAYERS_PER_DRAFT_LAYER = 7
_MAX_DRAFT_LAYERS = 5


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return up to five target layers, spread evenly from the second to the third from the end.

    DeepSpec's recipes for Qwen3 do the same. 36 layers give 1, 9, 17, 25, 33. A target with a single layer is tapped at
    its embedding (-1).
    """
    last = num_layers - 3
    if last < 1:
        return (max(num_layers - 2, -1),)
    count = min(_NUM_TAPS, last)
    return tuple(round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count))


def default_depth(num_layers: int) -> int:
    """Return the layers of the drafter: a seventh of the target's, 1 to 5."""
    return min(max(round(num_layers / _LAYERS_PER_DRAFT_LAYER), 1), _MAX_DRAFT_LAYERS)


class MaskTokens:
    """Return the token that may stand for "not known yet" in the slots after the anchor.

    It has to be one that the target never writes, and its embedding, which is the target's and stays frozen, must not
    be zero: all slots would then start out the same.

    Args:
        tokenizer: the target's, from transformers.
        embedding: ``[V, d]``, the target's.
        stop_ids: tokens that end an answer.
        counts: ``[V]`` how often each token occurs in the answers.
    """

    def __init__(self, tokenizer: Any, embedding: Tensor, stop_ids: frozenset[int], counts: Tensor) -> None:
        self._tokenizer = tokenizer
        self._embedding = embedding
        self._stop_ids = stop_ids
        self._counts = counts

    def default(self) -> int:
        """Return the tokenizer's mask token, else the first row without a token, else a special token that never comes.

        DeepSpec's drafters use the second kind for Qwen3 (151669) and the first for Gemma.

        Raises:
            ConfigError: no token fits.
        """
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        first_unused = max(self._tokenizer.get_vocab().values()) + 1
        for token in (self._tokenizer.mask_token_id, first_unused, *sorted(special, reverse=True)):
            if token is not None and token < len(self._embedding) and self._flaw(token) is None:
                return int(token)
        raise ConfigError("no token of the target is unused; name a rare one with --mask-token-id")

    def check(self, token: int) -> None:
        """Refuse a token that does not fit.

        Raises:
            ConfigError: naming the reason.
        """
        if not 0 <= token < len(self._embedding):
            raise ConfigError(f"--mask-token-id {token} is not in the vocabulary of {len(self._embedding)}; drop it")
        flaw = self._flaw(token)
        if flaw is not None:
            raise ConfigError(f"--mask-token-id {token} {flaw}; drop the flag, or name a token that is never written")

    def _flaw(self, token: int) -> str | None:
        if token in self._stop_ids:
            return "ends an answer"
        if self._counts[token]:
            return f"occurs {int(self._counts[token])} times in the answers"
        if not self._embedding[token].any():
            return "has an embedding of zeros"
        return None
