"""Read the options that requests have for their own verification. The front end has checked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
            rules=_chain_rules(each, [_second_text(req, answers) for req in reqs], device),
        )


def _chain_rules(
    each: Sequence[RequestOptions], texts: Sequence[NDArray[np.int64]], device: torch.device
) -> ChainRules | None:
    bounds, width = [_bounds(options) for options in each], max(text.shape[1] for text in texts)
    if all(asked == USUAL for asked in bounds) and not width:
        return None
    second = None
    if width:
        laid_out = np.stack([np.full((len(each), width), filler) for filler in (-1, _NEVER)])
        for row, text in enumerate(texts):
            laid_out[:, row, : text.shape[1]] = text
        rows = host_index([ASKED_ROWS if options.labels else CACHED_ROWS for options in each], device)
        tokens, needed = to_device(torch.from_numpy(laid_out), device)
        second = SecondTexts(tokens, needed, rows)
    return ChainRules(host_index(bounds, device), second)


def _bounds(options: RequestOptions) -> tuple[int, int, int, int]:
    """Return a row of :attr:`ChainRules.bounds`."""
    if options.preset == NO_PRESET:
        return (_NEVER, *USUAL[1:])
    length = options.max_draft or USUAL[2]
    if options.preset == SUMMARIZATION:
        return options.min_ngram, options.max_ngram, length, ASKED_ROWS
    return LEAST_MATCH, MOST_MATCH, length, 0


def _second_text(req: Any, answers: AnswerCache | None) -> NDArray[np.int64]:
    """Return [2, n], a text and what is needed in :class:`SecondTexts`, of a request: always the same."""
    if not hasattr(req, "dspark_second_text"):
        options = request_options(req)
        if answers is not None and options.cache:
            req.dspark_second_text = _answered(answers.read(options.cache))
        else:
            req.dspark_second_text = _looked_up(options.labels)
    text: NDArray[np.int64] = req.dspark_second_text
    return text


def _answered(text: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [2, n] of answers: they match anywhere, except at their ends."""
    goes_on = (text >= 0) & (np.append(text[1:], -1) >= 0)
    return np.stack([text, np.where(goes_on, LEAST_MATCH, _NEVER)]).astype(np.int64)


@lru_cache(maxsize=64)
def _looked_up(labels: tuple[tuple[int, ...], ...]) -> NDArray[np.int64]:
    """Return [2, n], a text and what is needed in :class:`SecondTexts`.

    All tokens from the beginning of a label to its place have to match.

    As many of them as are compared; and behind its last token there is nothing to be found.
    """
    tokens, needed = [], []
    for label in labels:
        tokens += [-1, *label]
        needed += [_NEVER, *(min(place, MOST_MATCH) for place in range(1, len(label))), _NEVER]
    return np.array([[*tokens, -1], [*needed, _NEVER]] if labels else [[], []], dtype=np.int64)
