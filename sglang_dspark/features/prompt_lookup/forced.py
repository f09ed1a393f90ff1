"""Read what grammars force, to draft it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING

from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.fence import fenced

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from transformers import PreTrainedTokenizerBase

_FORCED_TEXTS = 1024  # whose tokens are kept
_BEFORE = "\n"  # behind which tokenizers encode a text as inside of a longer one
_LETTERS = 16  # of a token, at most of most
_LONGEST_READ = 4096  # letters or tokens; the grammar computes all that it forces, in 0.3 ms
_FORCES_TOO_MUCH = "dspark_forces_too_much"


class ForcedTokens:
    """Read what the grammars of requests force: as much of it as a step can use, since it is read in every step.

    Args:
        tokenizer: the target's.
        vocab_size: of the target; its tokenizer may know more tokens.
        most: tokens that a step can use.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, most: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # Of tokens as many as of letters: a text that repeats itself is found again farther into what is forced.
        self._most = _LETTERS * (most + 1)
        self._encoded = lru_cache(_FORCED_TEXTS)(partial(_encoded, tokenizer))

    @fenced("tokens that grammars force", instead=lambda self, req: ())
    def of(self, req: Req) -> tuple[int, ...]:
        """Return a request's last token and those that its grammar forces behind it; nothing if it forces none."""
        grammar = req.grammar
        if grammar is None or grammar.finished or grammar.is_terminated() or hasattr(req, _FORCES_TOO_MUCH):
            return ()
        tokens, text = self._read(grammar)
        if len(tokens) + len(text) > _LONGEST_READ:
            setattr(req, _FORCES_TOO_MUCH, True)
        forced = tokens[: self._most] or self._encoded(text[: self._most])
        known = tuple(takewhile(lambda token: token < self._vocab_size, forced))
        return (req.output_ids[-1], *known) if known else ()

    def _read(self, grammar: BaseGrammarObject) -> tuple[Sequence[int], str]:
        """Return the tokens (llguidance) or the text (xgrammar) that a grammar forces."""
        try:
            return grammar.try_jump_forward(self._tokenizer) or ((), "")
        except UnicodeDecodeError as error:
            # xgrammar forces bytes, which may end within a letter, or begin within one behind a token that did.
            return (), error.object[: error.start].decode()


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the tokens of a forced text but for the last one, which may go on behind it."""
    before, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (_BEFORE, _BEFORE + text))
    return tuple(whole[len(before) : -1]) if whole[: len(before)] == before else ()
