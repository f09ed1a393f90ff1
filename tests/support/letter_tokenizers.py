"""Makes tokenizers of every kind whose tokens are pieces of letters, and texts in many scripts.

That of single bytes stands in for the golden target's, which knows some hundred words: grammars, stop strings and chats
need letters, not sense.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<mask>")  # ids 0, 1 and 2, as in the golden target
# The ids that the golden target likes to emit, 3 to 60.
NEVER = "ÀÁõö÷øùúûüýþÿ"  # stand for bytes that UTF-8 never has
COMMON = '{}[]":, abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ_-.'
CHAT = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"


def save_byte_tokenizer(
    folder: Path, vocab_size: int = 256, marks: tuple[str, ...] = (), beyond: tuple[str, ...] = ()
) -> Path:
    """Write it; return ``folder``. As with many tokenizers, a space without width has no token.

    Args:
        marks: special tokens at the end of the vocabulary.
        beyond: tokens after the vocabulary, which a model has no embedding for.
    """
    common = [letter.replace(" ", "Ġ") for letter in COMMON]
    others = sorted(
        set(pre_tokenizers.ByteLevel.alphabet()).difference(common), key=lambda letter: (letter in NEVER, letter)
    )
    tokens = [*[*SPECIAL, *common, *others][: vocab_size - len(marks)], *marks]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.normalizer = normalizers.Replace("\N{ZERO WIDTH SPACE}", "")
    return _saved(tokenizer, folder, marks, beyond)


def _saved(tokenizer: Tokenizer, folder: Path, marks: Sequence[str] = (), beyond: Sequence[str] = ()) -> Path:
    """Write a tokenizer of bytes with the special tokens of the golden target and others; return ``folder``."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *marks])
    tokenizer.add_tokens(list(beyond))
    pad, eos, mask = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, mask_token=mask)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


_FAMILY = "👨\u200d👩\u200d👧"  # three people and what joins them are one sign
_ALPHABETS = (
    "".join(map(chr, range(0x4E00, 0x9FA0))),  # ideographs
    "".join(map(chr, range(0xAC00, 0xD7A4))),  # Hangul
    (*map(chr, range(0x1F300, 0x1F650)), *[_FAMILY, "👍🏽", "🇩🇪", "❤\ufe0f"] * 40),
    ("e\u0301", "a\u0308", "o\u0302\u0323", "नि", "ด้", "é", "ß"),
    ("the", "cat", " ", " ", "\n", ".", "да", "🦊"),
)
_MAN, _HAN, _GEUL = "👨".encode(), "한".encode(), "글".encode()
# The ids that the golden target likes to emit; texts end within a letter again and again.
_PIECES = {
    33: _HAN[:1],
    21: "世".encode(),
    3: "界".encode(),
    39: "本".encode(),
    29: _MAN[:2],
    7: _GEUL[2:],
    13: _GEUL[:2],
    59: b" ",
    60: _MAN[2:],
    34: "é".encode(),
    96: _HAN[1:],
    97: "日".encode(),
}
KINDS = ("bytes", "pieces", "sentencepiece", "unstripped")


def mixed_text(rng: random.Random) -> str:
    """Return up to forty signs, of one alphabet or of several."""
    alphabets = rng.sample(_ALPHABETS, k=rng.randint(1, 3))
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 40)))


def letter_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of this kind, one of :data:`KINDS`; it writes every text as it was.

    ``bytes``: byte-level, a token for every byte. ``pieces``: byte-level, with tokens that end within a letter or reach
    over several. ``sentencepiece``: as Llama 2, letters and bytes for what it does not know; the first space belongs
    to the tokenizer. ``unstripped``: the same without, as Gemma.
    """
    rng = random.Random(0)
    texts = [mixed_text(rng) for _ in range(200)]
    if kind in ("bytes", "pieces"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=257 if kind == "bytes" else 500,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<eos>"],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        known = sorted({letter for text in texts[:20] for letter in text} | {"▁", "t", "h", "e"})
        vocab = {"<eos>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
        vocab |= {letter: 257 + place for place, letter in enumerate(known)}
        tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<eos>"))
        spaces = [normalizers.Replace(" ", "▁")]
        prepend, strip = [normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]
        llama = kind == "sentencepiece"
        tokenizer.normalizer = normalizers.Sequence(prepend * llama + spaces)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip * llama]
        )
        tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def save_piece_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer for the golden target, of whose likely tokens some end within a letter."""
    letter_of = dict(zip(_bytes_in_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    words = {id_: "".join(letter_of[byte] for byte in piece) for id_, piece in _PIECES.items()}
    others = iter([letter for byte, letter in letter_of.items() if letter not in words.values()])
    names = dict(enumerate(SPECIAL)) | words
    names |= {id_: next(others) for id_ in range(256) if id_ not in names}
    return _saved(Tokenizer(models.BPE({name: id_ for id_, name in names.items()}, [])), folder)


def _bytes_in_order() -> list[int]:
    """Return the bytes in the order of the letters that stand for them; those that can be printed come first."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printed + [byte for byte in range(256) if byte not in printed]


VOCAB, EOS, THINK_END = 256, 1, 2


class Backends:
    """A tokenizer, and what compiles grammars for it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(save_byte_tokenizer(folder))
        self.xgrammar = XGrammarGrammarBackend(self.tokenizer, VOCAB, [EOS])
        self.llguidance = GuidanceBackend(self.tokenizer, n_vocab=VOCAB)

    def reasoner(self, regex: str) -> Any:
        """A grammar that begins after the end of thoughts."""
        mark = self.tokenizer.convert_ids_to_tokens(THINK_END)
        parser = SimpleNamespace(detector=BaseReasoningFormatDetector(mark, mark))
        compiling, _ = ReasonerGrammarBackend(self.xgrammar, parser, self.tokenizer).get_cached_or_future_value(
            ("regex", regex), True
        )
        return compiling.result()


def after(grammar: Any, tokens: list[int]) -> Any:
    """A copy of a grammar at its start, after these tokens."""
    advanced = grammar.copy()
    for token in tokens:
        advanced.accept_token(token)
    return advanced
