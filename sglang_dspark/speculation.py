"""The ``speculation`` field of a request body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from sglang_dspark.declared import field_types, int_range, truncate, validate

KEY = "dspark"
"""Of ``custom_params``, which SGLang carries to the scheduler."""

Preset = Literal["auto", "none", "summarization", "classification", "replay"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
AUTO, NO_PRESET, SUMMARIZATION, CLASSIFICATION, REPLAY = PRESETS
COPYING: tuple[Preset, ...] = (SUMMARIZATION, CLASSIFICATION, REPLAY)
"""Presets that copy drafts, whatever others have been worth."""

_MOST_DRAFTS = 65535
_MOST_CANDIDATES = 1000
_LONGEST_CANDIDATE = 200  # bytes
_LONGEST_RECORDED = 32768
_LONGEST_KEY = 256
_LONGEST_CANDIDATES = 32768  # bytes in all: the front end serves no other request while it tokenizes them

# Which presets read a key; given without one of them, it would have no effect.
_READERS = {
    "min_ngram": (SUMMARIZATION,),
    "max_ngram": (SUMMARIZATION,),
    "max_draft": COPYING,
    "candidates": (CLASSIFICATION,),
    "recorded": (REPLAY,),
    "cache": (AUTO, SUMMARIZATION),
}
OF_PRESETS = ("preset", *_READERS)
"""Keys that concern presets."""


Ngram = Annotated[int, int_range(1, 8)]  # as many tokens as a search compares
Probability = Annotated[float, Meta(ge=0, le=1, description="must be a number from 0 to 1")]
Labels = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\S")], ...],
    Meta(
        min_length=1,
        max_length=_MOST_CANDIDATES,
        description=f"must be a list of 1 to {_MOST_CANDIDATES} strings that are not blank",
    ),
]
Recorded = Annotated[
    tuple[Annotated[int, Meta(ge=0)], ...],
    Meta(
        min_length=1,
        max_length=_LONGEST_RECORDED,
        description=f"must be a list of 1 to {_LONGEST_RECORDED} token ids",
    ),
]
Key = Annotated[
    str,
    Meta(
        pattern=rf"^[^\ud800-\udfff]{{1,{_LONGEST_KEY}}}\Z",
        description=f"must be a string of 1 to {_LONGEST_KEY} characters that UTF-8 can encode",
    ),
]


@dataclass(frozen=True)
class Speculation:
    """Per-request options of DSPARK.

    Attributes:
        enabled: whether drafts are verified for the request at all.
        max_verify: most drafts verified for it per step; None leaves it to the server.
        confidence_threshold: verify the drafts before the first one whose raw confidence is below this; None verifies
            whatever the policy says.
        preset: where drafts come from: the drafter, beside which candidates from the text compete (auto); the drafter
            alone (none); or, where there is something to copy, the text itself (summarization), the labels of
            ``candidates`` (classification), or the text of ``recorded`` (replay).
        min_ngram, max_ngram: lengths of the suffix that summarization looks up, the longest first.
        max_draft: most drafts that are copied per step; None leaves it to the server.
        candidates: labels that the answer may consist of.
        recorded: token ids that the answer is expected to be.
        cache: key under which the answer is kept, and under which earlier ones are looked up; None for neither.
        trace: return the decode rounds in ``meta_info["dspark_trace"]``, one entry per output token: the round at the
            first token that it committed, null elsewhere.
    """

    enabled: bool = True
    max_verify: Annotated[int, int_range(0, _MOST_DRAFTS)] | None = None
    confidence_threshold: Probability | None = None
    preset: Preset = "auto"
    min_ngram: Ngram = 3
    max_ngram: Ngram = 5
    max_draft: Annotated[int, int_range(1, _MOST_DRAFTS)] | None = None
    candidates: Labels = ()
    recorded: Recorded = ()
    cache: Key | None = None
    trace: bool = False

    @classmethod
    def parse(cls, value: Any) -> Speculation:
        """Check a decoded JSON value.

        Raises:
            ValueError: not an object, an unknown key, a bad value, or keys that do not go together; names
                ``speculation``, the key and the remedy.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ValueError(f"speculation must be an object, not {truncate(value)}")
        given = {}
        for key, entry in value.items():
            if key not in _TYPES:
                known = ", ".join(sorted(_TYPES))
                raise ValueError(f"speculation.{truncate(key)[1:-1]} is not a known option; known are {known}")
            try:
                given[key] = validate(entry, _TYPES[key])
                if key == "candidates":
                    _check_labels(given[key])
            except ValueError as error:
                raise ValueError(f"speculation.{key} {error}, not {truncate(entry)}") from None
        options = cls(**given)
        options._check_together(given)
        return options

    def _check_together(self, given: Mapping[str, Any]) -> None:
        for key, presets in _READERS.items():
            if key in given and self.preset not in presets:
                raise ValueError(
                    f"speculation.{key} belongs to the preset {' or '.join(presets)}, but speculation.preset is "
                    f'"{self.preset}"; change the preset or drop the key'
                )
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"speculation.min_ngram={self.min_ngram} exceeds speculation.max_ngram={self.max_ngram}; "
                "lower the one or raise the other"
            )
        if self.preset == CLASSIFICATION and not self.candidates:
            raise ValueError(
                'speculation.candidates is missing: the preset classification needs the labels, e.g. ["yes", "no"]'
            )
        if self.preset == REPLAY and not self.recorded:
            raise ValueError("speculation.recorded is missing: the preset replay needs the token ids of the answer")

    def for_scheduler(self, labels: tuple[tuple[int, ...], ...]) -> RequestOptions:
        """Return these options in the form that the scheduler reads.

        Args:
            labels: tokens of every spelling of every candidate.
        """
        return RequestOptions(
            max_verify=self.max_verify if self.enabled else 0,
            confidence_threshold=self.confidence_threshold or 0.0,
            preset=self.preset,
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            max_draft=self.max_draft,
            labels=(self.recorded,) if self.recorded else labels,
            cache=self.cache or "",
            trace=self.trace,
        )


class RequestOptions(Struct, frozen=True, omit_defaults=True):
    """Checked options of a request, as they travel to the scheduler. The defaults ask for nothing.

    Attributes:
        max_verify: most drafts verified for it per step, 0 if speculation is off; None leaves it to the server.
        confidence_threshold: as in :class:`Speculation`; 0 for none.
        preset, min_ngram, max_ngram, max_draft, trace: as in :class:`Speculation`.
        labels: tokens of every spelling of every candidate, or those recorded.
        cache: as in :class:`Speculation`; empty for none.
    """

    max_verify: int | None = None
    confidence_threshold: float = 0.0
    preset: Preset = AUTO
    min_ngram: int = 3
    max_ngram: int = 5
    max_draft: int | None = None
    labels: tuple[tuple[int, ...], ...] = ()
    cache: str = ""
    trace: bool = False

    def verify_limit(self, max_verify: int) -> int:
        """Return the most drafts verified per step on a server that verifies up to ``max_verify``."""
        return max_verify if self.max_verify is None else min(self.max_verify, max_verify)


_TYPES = field_types(Speculation)


def _check_labels(labels: tuple[str, ...]) -> None:
    try:
        sizes = [len(label.encode()) for label in labels]
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can encode") from None
    if max(sizes) > _LONGEST_CANDIDATE or sum(sizes) > _LONGEST_CANDIDATES:
        raise ValueError(f"must be strings of at most {_LONGEST_CANDIDATE} bytes, and {_LONGEST_CANDIDATES} in all")
