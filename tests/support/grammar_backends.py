"""SGLang's engines of grammars over the tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from byte_tokenizer import save_byte_tokenizer
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector
from transformers import AutoTokenizer

VOCAB, EOS, THINK_END = 256, 1, 2


class Backends:
    """A tokenizer, and what compiles grammars for it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(save_byte_tokenizer(folder))
        self.xgrammar = XGrammarGrammarBackend(self.tokenizer, VOCAB, [EOS])
        self.llguidance = GuidanceBackend(self.tokenizer, n_vocab=VOCAB)

    def reasoner(self, regex: str) -> Any:
        """A grammar that begins behind the end of thoughts."""
        mark = self.tokenizer.convert_ids_to_tokens(THINK_END)
        parser = SimpleNamespace(detector=BaseReasoningFormatDetector(mark, mark))
        compiling, _ = ReasonerGrammarBackend(self.xgrammar, parser, self.tokenizer).get_cached_or_future_value(
            ("regex", regex), True
        )
        return compiling.result()


def after(grammar: Any, tokens: list[int]) -> Any:
    """A copy of a grammar at its start, behind these tokens."""
    advanced = grammar.copy()
    for token in tokens:
        advanced.accept_token(token)
    return advanced
