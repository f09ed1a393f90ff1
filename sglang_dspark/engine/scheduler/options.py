"""The ``speculation`` field inside SGLang: checked in the front end, read in the scheduler.

It travels in ``custom_params`` of the sampling parameters. A value there is a scalar, a list of scalars or a flat
object, so candidate labels stand beside the other options, and their tokens beside both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.scheduler.last_batch import LastBatch
from sglang_dspark.proposals.candidate_labels import join_labels, spellings
from sglang_dspark.proposals.proposer import Proposer, Proposers
from sglang_dspark.speculation import CLASSIFICATION, NO_PRESET, Speculation
from sglang_dspark.step.limits import Limits
from sglang_dspark.step.state import Copies

OPTIONS_KEY = "dspark"
_CANDIDATES_KEY = "dspark_candidates"
_LABELS_KEY = "dspark_labels"
MOST_LABEL_TOKENS = 16384
"""Of all labels of a request: the scheduler takes milliseconds to read them, once for equal labels."""


def carried(options: Speculation) -> dict[str, Any]:
    """The entries of ``custom_params`` that hold ``options``; none when these ask for nothing."""
    scalars = options.to_dict()
    candidates = scalars.pop("candidates", None)
    entries = {OPTIONS_KEY: scalars} if scalars else {}
    return entries if candidates is None else entries | {_CANDIDATES_KEY: candidates}


def _read(custom_params: Any) -> Speculation:
    if not isinstance(custom_params, Mapping):
        return Speculation()
    options, candidates = custom_params.get(OPTIONS_KEY), custom_params.get(_CANDIDATES_KEY)
    if candidates is not None and isinstance(options, Mapping):
        options = {**options, "candidates": candidates}
    return Speculation.parse(options)


def settle(manager: Any, request: Any) -> None:
    """Check a request's options against the server and turn candidate labels into tokens, on the way to the scheduler.

    A client can write ``custom_params`` itself, with anything in our place, so all of it is checked here again.

    Args:
        manager: SGLang's ``TokenizerManager``.
        request: a single ``GenerateReqInput``.

    Raises:
        ValueError: names the key and the remedy.
    """
    parameters = request.sampling_params
    custom_params = parameters.get("custom_params") if isinstance(parameters, Mapping) else None
    if not isinstance(custom_params, dict):
        return
    options = _read(custom_params)
    drafter = attached(manager.server_args).drafter
    has_head = drafter is not None and drafter.config.enable_confidence_head
    if options.confidence_threshold is not None and not has_head:
        raise ValueError(
            "speculation.confidence_threshold needs a drafter with a confidence head, which this server does not have; "
            "use speculation.max_verify or drop the key"
        )
    custom_params.pop(_LABELS_KEY, None)
    if options.preset == CLASSIFICATION:
        if manager.tokenizer is None:
            raise ValueError("speculation.candidates needs a tokenizer; start the server without --skip-tokenizer-init")
        custom_params[_LABELS_KEY] = list(_label_tokens(manager.tokenizer, options.candidates))


@lru_cache(maxsize=4)  # the requests of a batch have the same candidates
def _label_tokens(tokenizer: Any, candidates: tuple[str, ...]) -> tuple[int, ...]:
    """Tokens of every spelling of every label, joined.

    Raises:
        ValueError: there are too many.
    """
    texts = [text for label in candidates for text in spellings(label)]
    labels = list(dict.fromkeys(map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"])))
    number = sum(map(len, labels))
    if number > MOST_LABEL_TOKENS:
        raise ValueError(
            f"speculation.candidates are {number} tokens, each label counted with and without a space before it; "
            f"pass fewer or shorter labels, of at most {MOST_LABEL_TOKENS} tokens in all"
        )
    return tuple(join_labels(labels))


def read(req: Any) -> Speculation:
    """Options of a scheduler-side request. What no front end of ours has checked asks for nothing."""
    if not hasattr(req, "dspark_options"):
        # Kept: a thousand candidate labels take milliseconds to check.
        try:
            req.dspark_options = _read(req.sampling_params.custom_params)
        except ValueError:
            req.dspark_options = Speculation()
    options: Speculation = req.dspark_options
    return options


def proposer_of(proposers: Proposers, req: Any, options: Speculation) -> Proposer:
    """What the preset of a scheduler-side request proposes drafts with."""
    labels = req.sampling_params.custom_params.get(_LABELS_KEY) if options.preset == CLASSIFICATION else None
    return proposers.make(options, req.origin_input_ids, labels or ())


@dataclass(frozen=True)
class BatchOptions:
    """What the requests of a batch ask for.

    Attributes:
        each: the options of every request.
        limits: on their verification; None when nobody asks for any.
        traced: whether a request wants its rounds.
        presets: places of the requests with a preset.
        max_verify: most drafts that the server verifies per request and step.
    """

    each: tuple[Speculation, ...]
    limits: Limits | None
    traced: bool
    presets: tuple[int, ...]
    max_verify: int

    def limits_with(self, copies: Copies | None) -> Limits | None:
        """The limits when presets propose ``copies``."""
        if copies is None:
            return self.limits
        limits = self.limits or Limits((self.max_verify,) * len(self.each), copies.lens)
        most = tuple(copied or most for copied, most in zip(copies.lens, limits.most, strict=True))
        return Limits(most, copies.lens, limits.thresholds)


class OptionsReader(LastBatch[BatchOptions]):
    """Options of a batch, read again only when its requests change.

    Args:
        max_verify: most drafts that the server verifies per request and step.
    """

    def __init__(self, max_verify: int) -> None:
        super().__init__(self._options_of)
        self._max_verify = max_verify

    def _options_of(self, reqs: Sequence[Any]) -> BatchOptions:
        each = tuple(map(read, reqs))
        limits = (options.verify_limit for options in each)
        most = tuple(self._max_verify if limit is None else min(limit, self._max_verify) for limit in limits)
        bounds = tuple(options.confidence_threshold or 0.0 for options in each)
        asked = any(limit < self._max_verify for limit in most) or any(bounds)
        return BatchOptions(
            each=each,
            limits=Limits(most, (0,) * len(most), bounds if any(bounds) else None) if asked else None,
            traced=any(options.trace for options in each),
            presets=tuple(place for place, options in enumerate(each) if self._proposes(options)),
            max_verify=self._max_verify,
        )

    def _proposes(self, options: Speculation) -> bool:
        return options.preset != NO_PRESET and options.copy_limit(self._max_verify) > 0
