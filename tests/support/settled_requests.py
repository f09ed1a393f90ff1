"""Requests as the front end settles them, in the form that the scheduler reads."""

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_objects import model_config, partly, request, server_args

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.requests import settle
from sglang_dspark.engine.server import DSparkServer, attach

VOCAB = 0x110000


class LetterTokenizer:
    """A token for each letter."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def settled(field, tokenizer=None, vocab_size=VOCAB, **options):
    """The scheduler-side request of one with this field ``speculation``, on a server with these options."""
    return settled_params({"dspark": field}, tokenizer, vocab_size, **options)


def settled_params(custom_params, tokenizer=None, vocab_size=VOCAB, **options):
    """The same of one with these ``custom_params``."""
    made, args = request(prompt=[1, 2], custom_params=custom_params), server_args()
    attach(args, DSparkServer(DSparkConfig(**options), drafter=None, dummy_draft=False))
    target = model_config(vocab_size=vocab_size)
    settle(partly(TokenizerManager, tokenizer=tokenizer, server_args=args, model_config=target), made.sampling_params)
    return made
