"""Holds the unit of the report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do if that is not enough."""

    status: Status
    subject: str
    found: str
    remedy: str = ""


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether anything stands in the way of serving."""
    return any(finding.status == "fail" for finding in findings)


def one_line(error: BaseException) -> str:
    """Kind and text of an exception without line breaks."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")
