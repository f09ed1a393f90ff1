"""Texts in many scripts, and tokenizers of every kind whose tokens are pieces of their letters."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_FAMILY = "👨\u200d👩\u200d👧"  # three people and what joins them are one sign
_ALPHABETS = (
    "".join(map(chr, range(0x4E00, 0x9FA0))),  # ideographs
    "".join(map(chr, range(0xAC00, 0xD7A4))),  # Hangul
    (*map(chr, range(0x1F300, 0x1F650)), *[_FAMILY, "👍🏽", "🇩🇪", "❤\ufe0f"] * 40),
    ("e\u0301", "a\u0308", "o\u0302\u0323", "नि", "ด้", "é", "ß"),
    ("the", "cat", " ", " ", "\n", ".", "да", "🦊"),
)
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
