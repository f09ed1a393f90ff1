"""A tokenizer of single bytes for the golden target, whose own knows some hundred words and no punctuation.

Its ids mean other letters than the target was trained on; grammars, stop strings and chats need letters, not sense.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
        beyond: tokens behind the vocabulary, which a model has no embedding for.
    """
    common = [letter.replace(" ", "Ġ") for letter in COMMON]
    others = sorted(
        set(pre_tokenizers.ByteLevel.alphabet()).difference(common), key=lambda letter: (letter in NEVER, letter)
    )
    tokens = [*[*SPECIAL, *common, *others][: vocab_size - len(marks)], *marks]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.normalizer = normalizers.Replace("\N{ZERO WIDTH SPACE}", "")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *marks])
    tokenizer.add_tokens(list(beyond))
    pad, eos, mask = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, mask_token=mask)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder
