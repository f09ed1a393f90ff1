"""Can this machine serve this pair of models with DSPARK, and if not, why?

Every check yields :class:`Finding` objects, which the command line prints. If SGLang is missing or is another release,
a check says what it could not look at. Pairs get the checks that a start makes
(:mod:`sglang_dspark.engine.checks`).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do if that is not enough."""

    status: Literal["ok", "note", "fail"]
    subject: str
    found: str
    remedy: str = ""


def one_line(error: BaseException) -> str:
    """Kind and text of an exception without line breaks."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")
