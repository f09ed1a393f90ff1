"""Read the options that requests have for their own verification. The front end has checked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, LEAST_MATCH, MOST_MATCH, USUAL, ChainRules, SecondTexts, to_device
from numpy.typing import NDArray

from sglang_dspark.engine.scheduler.answer_cache import AnswerCache
from sglang_dspark.speculation import COPYING, KEY, NO_PRESET, SUMMARIZATION, RequestOptions
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.transfers import host_index

Tokens = tuple[int, ...]

_NOTHING = RequestOptions()
_NEVER = MOST_MATCH + 1


def request_options(req: Any) -> RequestOptions:
    """Return the options of a scheduler-side request, which are read once."""
    if not hasattr(req, "dspark_options"):
        text = (req.sampling_params.custom_params or {}).get(KEY)
        req.dspark_options = _NOTHING if text is None else msgspec.json.decode(text, type=RequestOptions)
    options: RequestOptions = req.dspark_options
    return options


@dataclass(frozen=True)
class BatchOptions:
    """The options of a batch's requests.

    Attributes:
        limits: on their verification; None if no request asks for any.
        traced: whether a request wants its rounds.
        rules: of their chains; None if all requests have the usual ones.
    """

    limits: RequestLimits | None
    traced: bool
    rules: ChainRules | None

    @classmethod
    def of(
        cls,
        reqs: Sequence[Any],
        max_verify: int,
        device: torch.device,
        *,
        draft_free: bool = False,
        answers: AnswerCache | None = None,
    ) -> BatchOptions:
        """Read the options of a batch.

        Args:
            max_verify: most drafts that the server verifies per request and step.
            device: where steps are.
            draft_free: whether nothing is verified of requests without a preset that copies.
            answers: of which a request sees those that are there when it is first read.
        """
        each = tuple(map(request_options, reqs))
        speculate = [not draft_free or options.preset in COPYING for options in each]
        most = tuple(
            options.verify_limit(max_verify) if speculates else 0
            for options, speculates in zip(each, speculate, strict=True)
        )
        bounds = tuple(options.confidence_threshold for options in each)
        limited = min(most) < max_verify or any(bounds)
        return cls(
            limits=RequestLimits(most, bounds if any(bounds) else None) if limited else None,
            traced=any(options.trace for options in each),
            rules=chain_rules(reqs, device, answers),
        )


def chain_rules(
    reqs: Sequence[Any],
    device: torch.device,
    answers: AnswerCache | None = None,
    forced: Sequence[Tokens] | None = None,
) -> ChainRules | None:
    """Return what requests ask of their chains; None if all of them have the usual ones.

    Args:
        answers: as in :meth:`BatchOptions.of`.
        forced: the last token of each request and those that its grammar forces behind it, if any; None for none.
    """
    bounds = [_bounds(request_options(req)) for req in reqs]
    texts, rows = zip(*map(partial(_second_text, answers), reqs, forced or [()] * len(reqs)), strict=True)
    width = max(text.shape[1] for text in texts)
    if all(asked == USUAL for asked in bounds) and not width:
        return None
    second = None
    if width:
        laid_out = np.stack([np.full((len(reqs), width), filler) for filler in (-1, _NEVER)])
        for row, text in enumerate(texts):
            laid_out[:, row, : text.shape[1]] = text
        tokens, needed = to_device(torch.from_numpy(laid_out), device)
        second = SecondTexts(tokens, needed, host_index(rows, device))
    return ChainRules(host_index(bounds, device), second)


def _bounds(options: RequestOptions) -> tuple[int, int, int, int]:
    """Return a row of :attr:`ChainRules.bounds`."""
    if options.preset == NO_PRESET:
        return (_NEVER, *USUAL[1:])
    length = options.max_draft or USUAL[2]
    if options.preset == SUMMARIZATION:
        return options.min_ngram, options.max_ngram, length, ASKED_ROWS
    return LEAST_MATCH, MOST_MATCH, length, 0


def _second_text(answers: AnswerCache | None, req: Any, forced: Tokens) -> tuple[NDArray[np.int64], int]:
    """Return [2, n], a text and what is needed in :class:`SecondTexts`, of a request, and the rows of its kind.

    It is always the same but for what is forced, which is a label of one step.
    """
    options = request_options(req)
    if forced and options.preset != NO_PRESET:
        return np.concatenate([_laid_out((forced,)), _looked_up(options.labels)], axis=1), ASKED_ROWS
    if not hasattr(req, "dspark_second_text"):
        if answers is not None and options.cache:
            req.dspark_second_text = _answered(answers.read(options.cache)), CACHED_ROWS
        else:
            req.dspark_second_text = _looked_up(options.labels), ASKED_ROWS
    text: tuple[NDArray[np.int64], int] = req.dspark_second_text
    return text


def _answered(text: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [2, n] of answers: they match anywhere, except at their ends."""
    goes_on = (text >= 0) & (np.append(text[1:], -1) >= 0)
    return np.stack([text, np.where(goes_on, LEAST_MATCH, _NEVER)]).astype(np.int64)


def _laid_out(labels: tuple[Tokens, ...]) -> NDArray[np.int64]:
    """Return [2, n], a text and what is needed in :class:`SecondTexts`.

    All tokens from the beginning of a label to its place have to match, as many of them as are compared; and behind its
    last token there is nothing to be found.
    """
    tokens, needed = [], []
    for label in labels:
        tokens += [-1, *label]
        needed += [_NEVER, *(min(place, MOST_MATCH) for place in range(1, len(label))), _NEVER]
    return np.array([[*tokens, -1], [*needed, _NEVER]] if labels else [[], []], dtype=np.int64)


# Labels take milliseconds to lay out. What is forced is another text in every step, which would push them out.
_looked_up = lru_cache(maxsize=64)(_laid_out)
