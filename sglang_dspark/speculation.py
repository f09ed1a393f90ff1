"""The ``speculation`` field of a request body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

NO_PRESET, SUMMARIZATION, CLASSIFICATION = PRESETS = ("none", "summarization", "classification")

_MOST_DRAFTS = 65535
_MOST_NGRAM = 16
# Every n-gram length costs an index entry per token of the prompt.
_MOST_NGRAM_LENGTHS = 8
_MOST_CANDIDATES = 1000
_LONGEST_CANDIDATE = 200  # bytes: a beginning is looked for token by token in every step
_LONGEST_CANDIDATES = 32768  # bytes in all: the front end serves nobody else while it tokenizes them

# Which presets read a key; given without one of them, it would have no effect.
_READERS = {
    "min_ngram": (SUMMARIZATION,),
    "max_ngram": (SUMMARIZATION,),
    "max_draft": (SUMMARIZATION, CLASSIFICATION),
    "candidates": (CLASSIFICATION,),
}


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _integer(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return check


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return float(value)


def _preset(value: Any) -> str:
    if value not in PRESETS:
        raise ValueError(f"must be one of {', '.join(PRESETS)}")
    return str(value)


def _candidates(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and 0 < len(value) <= _MOST_CANDIDATES
    if not is_list or not all(isinstance(label, str) and label.strip() for label in value):
        raise ValueError(f"must be a list of 1 to {_MOST_CANDIDATES} strings that are not blank")
    try:
        sizes = [len(label.encode()) for label in value]
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can encode") from None
    if max(sizes) > _LONGEST_CANDIDATE or sum(sizes) > _LONGEST_CANDIDATES:
        raise ValueError(f"must be strings of at most {_LONGEST_CANDIDATE} bytes, and {_LONGEST_CANDIDATES} in all")
    return tuple(value)


def _key(check: Callable[[Any], Any], default: Any) -> Any:
    return field(default=default, metadata={"check": check})


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

    enabled: bool = _key(_switch, True)
    max_verify: int | None = _key(_integer(0, _MOST_DRAFTS), None)
    confidence_threshold: float | None = _key(_probability, None)
    preset: str = _key(_preset, NO_PRESET)
    min_ngram: int = _key(_integer(1, _MOST_NGRAM), 3)
    max_ngram: int = _key(_integer(1, _MOST_NGRAM), 5)
    max_draft: int | None = _key(_integer(1, _MOST_DRAFTS), None)
    candidates: tuple[str, ...] = _key(_candidates, ())
    trace: bool = _key(_switch, False)

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
            raise ValueError(f"speculation must be an object, not {_shown(value)}")
        checks = {knob.name: knob.metadata["check"] for knob in fields(cls)}
        checked = {}
        for key, entry in value.items():
            if key not in checks:
                raise ValueError(f"speculation.{key} is not a known option; known are {', '.join(sorted(checks))}")
            try:
                checked[key] = checks[key](entry)
            except ValueError as error:
                raise ValueError(f"speculation.{key} {error}, not {_shown(entry)}") from None
        options = cls(**checked)
        options._check_together(checked)
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
