"""Say for each request of a batch what is looked up, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

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

from sglang_dspark.engine.request_options import kept_by_request
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.features.prompt_lookup.answer_cache import AnswerCache
from sglang_dspark.features.prompt_lookup.keys import LookupKeys, answer_key, lookup_options
from sglang_dspark.features.prompt_lookup.options import NO_PRESET, SUMMARIZATION, Tokens
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.step.packed import host_index

MOST_PLACES = 2**20
"""Of all texts that a step looks up: of 64 answers of 16,384 tokens, some 60 MB of a device's memory."""
_NEVER = MOST_MATCH + 1
_NO_TEXT = np.empty((3, 0), dtype=np.int64)


@fenced("rules of candidates", instead=nothing)
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


@fenced("tokens that grammars force", instead=lambda rules, *_given: rules)
def with_forced(
    rules: ChainRules | None, reqs: Sequence[Req], forced: Sequence[Tokens], device: torch.device
) -> ChainRules | None:
    """Return the rules of one step, in which grammars force tokens.

    Args:
        rules: of :func:`rules_of`.
        forced: the last token of each request and those that its grammar forces behind it, which are a label of this
            step; none for most requests.
    """
    allowed = [
        tokens if lookup_options(req).preset != NO_PRESET else () for req, tokens in zip(reqs, forced, strict=True)
    ]
    second = _in_a_row([_laid_out((tokens,), MOST_MATCH) if tokens else _NO_TEXT for tokens in allowed], device)
    if second is None:
        return rules
    if rules is None:
        return ChainRules(usual_bounds(device).repeat(len(reqs), 1), second)
    return ChainRules(rules.bounds, second.beside(rules.second))


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


@fenced("texts to copy from", instead=lambda req, *_given: _NO_TEXT)
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

    All tokens from the beginning of a label to its place have to match, or the last ``most`` of them; and behind its
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
