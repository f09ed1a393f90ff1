"""A tokenizer of bytes and of pieces of letters, for a target of 256 tokens.

It has what makes servers fail: tokens that begin or end inside a letter, a normaliser that leaves nothing of some
texts, and tokens that the target has not.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<mask>")
UNKNOWN = ("<extra>", "<image>")  # to the target: their ids are past its vocabulary
VANISHING = "\u200b"
VOCABULARY = 256
_NEVER = (*range(0xF5, 0x100), 0xC0, 0xC1, *range(0x0B), *range(0x0E, 0x20), 0x7F)  # bytes of no text here
# Pairs of bytes or of pieces: the first bytes of letters, whole letters, and a space with half a letter.
_MERGES = (
    *("Ð °", "Ð ½", "Ñ Ĥ", "Ġ Ð", "Ġ Ñ", "Ã ©", "Ã ¨", "ã ģ", "ãģ Ĥ", "æ Ĺ", "æĹ ¥", "í ķ", "Ø §", "ð Ł", "ðŁ ĺ"),
    *("o k", "t r", "tr u", "Ġ a", 'Ġ "', "a b", "c d"),
)
CHAT = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}a:"
)


def save(folder: Path, unknown: tuple[str, ...] = UNKNOWN) -> Path:
    """Write it into ``folder``, and return that.

    Args:
        unknown: its tokens that the target has not.
    """
    alphabet = {letter: byte for byte, letter in _letters().items()}
    pieces = ["".join(merge.split(" ")) for merge in _MERGES]
    tokens = [*SPECIAL, *(letter for letter, byte in alphabet.items() if byte not in _NEVER), *pieces][:VOCABULARY]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY - len(tokens))] + list(unknown)
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(*merge.split(" "),) for merge in _MERGES]))
    tokenizer.normalizer = normalizers.Replace(VANISHING, "")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *unknown])
    pad, eos, mask = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, mask_token=mask)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


def _letters() -> dict[int, str]:
    """Return by which letter each byte stands in a byte-level vocabulary: itself where it can be seen, else another."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
