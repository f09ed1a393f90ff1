"""The ``speculation`` field of a request body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from sglang_dspark.declared import checked, kinds, shown, whole

Preset = Literal["none", "summarization", "classification"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
NO_PRESET, SUMMARIZATION, CLASSIFICATION = PRESETS

_MOST_DRAFTS = 65535
# Every n-gram length costs an index entry per token of the prompt.
_MOST_NGRAM_LENGTHS = 8
_MOST_CANDIDATES = 1000
_LONGEST_CANDIDATE = 200  # bytes
_LONGEST_CANDIDATES = 32768  # bytes in all: the front end serves no other request while it tokenizes them

# Which presets read a key; given without one of them, it would have no effect.
_READERS = {
    "min_ngram": (SUMMARIZATION,),
    "max_ngram": (SUMMARIZATION,),
    "max_draft": (SUMMARIZATION, CLASSIFICATION),
    "candidates": (CLASSIFICATION,),
}


Ngram = Annotated[int, whole(1, 16)]
Probability = Annotated[float, Meta(ge=0, le=1, description="must be a number from 0 to 1")]
Labels = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\S")], ...],
    Meta(
        min_length=1,
        max_length=_MOST_CANDIDATES,
        description=f"must be a list of 1 to {_MOST_CANDIDATES} strings that are not blank",
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
        preset: where drafts come from before the drafter is asked: the text itself (summarization), the labels of
            ``candidates`` (classification), or nowhere.
        min_ngram, max_ngram: lengths of the suffix that summarization looks up, the longest first.
        max_draft: most drafts that the preset proposes per step; None leaves it to the server.
        candidates: labels that the answer may consist of.
        trace: return the decode rounds in ``meta_info["dspark_trace"]``, one entry per output token: the round at the
            first token that it committed, null elsewhere.
    """

    enabled: bool = True
    max_verify: Annotated[int, whole(0, _MOST_DRAFTS)] | None = None
    confidence_threshold: Probability | None = None
    preset: Preset = "none"
    min_ngram: Ngram = 3
    max_ngram: Ngram = 5
    max_draft: Annotated[int, whole(1, _MOST_DRAFTS)] | None = None
    candidates: Labels = ()
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
            raise ValueError(f"speculation must be an object, not {shown(value)}")
        given = {}
        for key, entry in value.items():
            if key not in _KINDS:
                raise ValueError(f"speculation.{key} is not a known option; known are {', '.join(sorted(_KINDS))}")
            try:
                given[key] = checked(entry, _KINDS[key])
                if key == "candidates":
                    _check_labels(given[key])
            except ValueError as error:
                raise ValueError(f"speculation.{key} {error}, not {shown(entry)}") from None
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
        if self.max_ngram - self.min_ngram >= _MOST_NGRAM_LENGTHS:
            raise ValueError(
                f"speculation.min_ngram={self.min_ngram} to speculation.max_ngram={self.max_ngram} are more than "
                f"{_MOST_NGRAM_LENGTHS} lengths to look up; raise the one or lower the other"
            )
        if self.preset == CLASSIFICATION and not self.candidates:
            raise ValueError(
                'speculation.candidates is missing: the preset classification needs the labels, e.g. ["yes", "no"]'
            )

    @property
    def verify_limit(self) -> int | None:
        """Most drafts verified per step, ``enabled`` included; None without a limit."""
        return self.max_verify if self.enabled else 0

    def copy_limit(self, max_verify: int) -> int:
        """Most drafts that the preset may propose per step on a server that verifies up to ``max_verify``."""
        limits = (self.max_draft, self.verify_limit, max_verify)
        return min(limit for limit in limits if limit is not None)

    def to_dict(self) -> dict[str, Any]:
        """Options that differ from their defaults, as JSON values."""
        values = {knob.name: (getattr(self, knob.name), knob.default) for knob in fields(self)}
        changed = {name: value for name, (value, default) in values.items() if value != default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


_KINDS = kinds(Speculation)


def _check_labels(labels: tuple[str, ...]) -> None:
    try:
        sizes = [len(label.encode()) for label in labels]
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can encode") from None
    if max(sizes) > _LONGEST_CANDIDATE or sum(sizes) > _LONGEST_CANDIDATES:
        raise ValueError(f"must be strings of at most {_LONGEST_CANDIDATE} bytes, and {_LONGEST_CANDIDATES} in all")
