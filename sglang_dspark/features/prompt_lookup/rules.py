"""Says for each request of a batch what is looked up, and where: its text, what its grammar forces, earlier answers.

Finished answers are kept on the host under the keys of their requests: others may go on as these did.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from dspark_kernels import (
    ASKED_ROWS,
    CACHED_ROWS,
    LEAST_MATCH,
    MOST_MATCH,
    USUAL,
    ChainRules,
    SecondTexts,
    to_device,
    usual_bounds,
)
from numpy.typing import NDArray
from xgrammar import TokenizerInfo

from sglang_dspark.engine.logits_processing import MASK_BITS
from sglang_dspark.engine.request_options import kept_by_request
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.errors import best_effort, nothing
from sglang_dspark.features.prompt_lookup.keys import (
    NO_PRESET,
    SUMMARIZATION,
    LookupKeys,
    Tokens,
    answer_key,
    lookup_options,
)
from sglang_dspark.step.packed import host_index

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from transformers import PreTrainedTokenizerBase


_FORCED_TEXTS = 1024  # whose tokens are kept
_BEFORE = "\n"  # after which tokenizers encode a text as inside of a longer one
_MOST_WORDS = 16  # of a mask in which the beginnings of one text are allowed, and nothing else


class ForcedTokens:
    """Read what the grammars of requests force: as much of it as a step can use, since it is read in every step.

    Grammars can tell it themselves, but they tell all of it, which may take seconds or have no end. So it is read token
    by token from their masks.

    Args:
        tokenizer: the target's; None if the server has none.
        vocab_size: of the target; its tokenizer may know more tokens.
        most: tokens that a step can use.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, most: int) -> None:
        self._vocab_size = vocab_size
        # A text that repeats itself is found again so many tokens into what is forced. The last token is left out.
        self._most = MOST_MATCH + most + 1
        self._texts = _texts(tokenizer, vocab_size)
        self._encoded = lru_cache(_FORCED_TEXTS)(partial(_encoded, tokenizer))

    @best_effort("tokens that grammars force", instead=lambda self, req: ())
    def of(self, req: Req) -> tuple[int, ...]:
        """Return a request's last token and those that its grammar forces after it; nothing if it forces none."""
        grammar = req.grammar
        if grammar is None or grammar.finished or grammar.is_terminated() or lookup_options(req).preset == NO_PRESET:
            return ()
        forced = self._encoded(_whole_letters(self._read(grammar)))
        known = tuple(takewhile(lambda token: token < self._vocab_size, forced))
        return (req.output_ids[-1], *known) if known else ()

    def _read(self, grammar: BaseGrammarObject) -> bytes:
        """Return the text that a grammar forces, and leave the grammar as it was."""
        mask = grammar.allocate_vocab_mask(self._vocab_size, 1, "cpu")
        tokens: list[int] = []
        try:
            while len(tokens) < self._most and not grammar.is_terminated():
                mask.fill_(-1)
                grammar.fill_vocab_mask(mask, 0)
                token = self._forced(mask.numpy()[0])
                if token is None:
                    break
                grammar.accept_token(token)
                tokens.append(token)
            whole = tokens[:-1] if grammar.is_terminated() else tokens  # what ends a text is no text
        finally:
            if tokens:
                grammar.rollback(len(tokens))
        return b"".join(self._texts[token] for token in whole)

    def _forced(self, words: NDArray[np.int32]) -> int | None:
        """Return the longest of the tokens that a mask [W] allows, if all others are beginnings of it."""
        places = np.flatnonzero(words).tolist()
        if not 0 < len(places) <= _MOST_WORDS:
            return None
        allowed = [(place, int(words[place])) for place in places]
        tokens = [place * MASK_BITS + bit for place, word in allowed for bit in range(MASK_BITS) if word >> bit & 1]
        texts = {token: self._texts[token] for token in tokens}
        longest = max(texts, key=lambda token: len(texts[token]))
        whole = texts[longest]
        return longest if all(text and whole.startswith(text) for text in texts.values()) else None


@best_effort("texts of tokens", instead=lambda tokenizer, vocab_size: [])
def _texts(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[bytes]:
    """Return the text of each token of a mask; none of those that the tokenizer does not have."""
    if tokenizer is None:
        return []
    if hasattr(tokenizer, "init_xgrammar"):  # one of SGLang's own
        info, _ = tokenizer.init_xgrammar()
    else:
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    texts: list[bytes] = info.decoded_vocab
    return texts + [b""] * (vocab_size + MASK_BITS)


def _whole_letters(text: bytes) -> str:
    """Return the text before the first byte that is not part of a whole letter: another token may have its others."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the tokens of a forced text except the last one, which may go on after it."""
    before, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (_BEFORE, _BEFORE + text))
    return tuple(whole[len(before) : -1]) if whole[: len(before)] == before else ()


MOST_TOKENS = 8192
"""Of the answers under one key; the newest are kept."""
_ENTRY_BYTES = 200  # of the dictionary, for each key
_BREAK = np.array([-1], dtype=np.int32)
_NOTHING = _BREAK[:0]

Key = str | bytes
"""What a client has chosen, or what :func:`~.keys.answer_key` has made of a prompt; nothing where empty."""


class AnswerCache:
    """Keep answers by key, those that were used last.

    It depends on nothing but the requests and their order, so all ranks of a server keep the same.

    Args:
        most_bytes: of all keys and answers; 0 keeps nothing.
        by_prompt: whether requests without a key have one made of their prompt.
    """

    def __init__(self, most_bytes: int, *, by_prompt: bool = False) -> None:
        self._texts: OrderedDict[Key, NDArray[np.int32]] = OrderedDict()
        self._most_bytes, self.num_bytes = most_bytes, 0
        self.by_prompt = by_prompt

    def keep(self, key: Key, tokens: Sequence[int]) -> None:
        """Put an answer before those of its key, and drop what there is no room for."""
        answer, before = np.array(tokens[: MOST_TOKENS - 1], dtype=np.int32), self._drop(key)
        text = np.concatenate([_BREAK, answer, before[: MOST_TOKENS - 1 - len(answer)]])
        self._texts[key] = text
        self.num_bytes += _bytes(key, text)
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._texts)))

    def read(self, key: Key) -> NDArray[np.int32]:
        """Return [n] tokens of the answers of a key, the newest first, -1 before each; it does not change any more."""
        if key not in self._texts:
            return _NOTHING
        self._texts.move_to_end(key)
        return self._texts[key]

    def clear(self) -> None:
        """Drop everything."""
        self._texts.clear()
        self.num_bytes = 0

    def _drop(self, key: Key) -> NDArray[np.int32]:
        """Forget a key, and return its answers."""
        text = self._texts.pop(key, None)
        if text is None:
            return _NOTHING
        self.num_bytes -= _bytes(key, text)
        return text


def _bytes(key: Key, text: NDArray[np.int32]) -> int:
    return sys.getsizeof(key) + sys.getsizeof(text) + _ENTRY_BYTES


MOST_PLACES = 2**20
"""Of all texts that a step looks up: of 64 answers of 16,384 tokens, some 60 MB of a device's memory."""
_NEVER = MOST_MATCH + 1
_NO_TEXT = np.empty((3, 0), dtype=np.int64)


@best_effort("rules of candidates", instead=nothing)
def rules_of(reqs: Sequence[Req], device: torch.device, answers: AnswerCache) -> ChainRules | None:
    """Return what requests ask for; None if all of them ask for nothing.

    Args:
        answers: of which a request sees those that are there; more may have come when the batch is another one.
    """
    bounds = [_bounds(lookup_options(req)) for req in reqs]
    answered = cache(lambda key: _answered(answers.read(key)))  # samples of one prompt have the same ones
    second = _in_a_row([_second_text(req, answers.by_prompt, answered) for req in reqs], device)
    if second is None and all(asked == USUAL for asked in bounds):
        return None
    return ChainRules(host_index(bounds, device), second)


@best_effort("tokens that grammars force", instead=lambda rules, *_given: rules)
def with_forced(
    rules: ChainRules | None, reqs: Sequence[Req], forced: Sequence[Tokens], device: torch.device
) -> ChainRules | None:
    """Return the rules of one step, in which grammars force tokens.

    Args:
        rules: of :func:`rules_of`.
        forced: the last token of each request and those that its grammar forces after it, which are a label of this
            step; none for most requests.
    """
    second = _in_a_row([_laid_out((tokens,), MOST_MATCH) if tokens else _NO_TEXT for tokens in forced], device)
    if second is None:
        return rules
    if rules is None:
        return ChainRules(usual_bounds(device).repeat(len(reqs), 1), second)
    return ChainRules(rules.bounds, second.joined(rules.second))


def _in_a_row(texts: Sequence[NDArray[np.int64]], device: torch.device) -> SecondTexts | None:
    """Return what is looked up, of [3, n] for each request; None if there is nothing.

    What a step costs grows with all of it: requests whose texts go past the bound are drafted without them.
    """
    kept, left = [], MOST_PLACES
    for text in texts:
        fits = text.shape[1] <= left
        kept.append(text if fits else _NO_TEXT)
        left -= text.shape[1] * fits
    if left == MOST_PLACES:
        return None
    requests = np.repeat(np.arange(len(kept)), [text.shape[1] for text in kept])
    laid_out = np.concatenate([np.concatenate(kept, axis=1), requests[None]])
    return SecondTexts(*to_device(torch.from_numpy(laid_out), device))


def _bounds(options: LookupKeys) -> tuple[int, int, int, int]:
    """Return a row of :attr:`ChainRules.bounds`."""
    if options.preset == NO_PRESET:
        return (_NEVER, *USUAL[1:])
    length = options.max_draft or USUAL[2]
    if options.preset == SUMMARIZATION:
        return options.min_ngram, options.max_ngram, length, ASKED_ROWS
    return LEAST_MATCH, MOST_MATCH, length, 0


@best_effort("texts to copy from", instead=lambda req, *_given: _NO_TEXT)
def _second_text(req: Req, by_prompt: bool, answered: Callable[[str | bytes], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return [3, n], a text, what is needed and the rows in :class:`SecondTexts`, of a request."""
    named, key = _named_text(req), answer_key(req, by_prompt=by_prompt)
    return np.concatenate([named, answered(key)], axis=1) if key else named


@kept_by_request
def _named_text(req: Req) -> NDArray[np.int64]:
    options = lookup_options(req)
    return np.concatenate([_looked_up(options.labels, MOST_MATCH), _laid_out(options.predicted, LEAST_MATCH)], axis=1)


def _answered(text: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [3, n] of answers: they match anywhere, except at their ends."""
    if not len(text):
        return _NO_TEXT
    text = np.append(text, -1)  # what follows is another request's
    goes_on = (text >= 0) & (np.append(text[1:], -1) >= 0)
    return np.stack([text, np.where(goes_on, LEAST_MATCH, _NEVER), np.full_like(text, CACHED_ROWS)]).astype(np.int64)


def _laid_out(labels: tuple[Tokens, ...], most: int) -> NDArray[np.int64]:
    """Return [3, n] of labels.

    All tokens from the beginning of a label to its place have to match, or the last ``most`` of them; and after its
    last token there is nothing to be found.
    """
    if not labels:
        return _NO_TEXT
    tokens, needed = [], []
    for label in labels:
        tokens += [-1, *label]
        needed += [_NEVER, *(min(place, most) for place in range(1, len(label))), _NEVER]
    return np.array([[*tokens, -1], [*needed, _NEVER], [ASKED_ROWS] * (len(tokens) + 1)], dtype=np.int64)


# Labels take milliseconds to lay out. What is forced or predicted is another text each time, which would push them out.
_looked_up = lru_cache(maxsize=64)(_laid_out)
