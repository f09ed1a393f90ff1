"""What start-up has settled about a server. It travels on SGLang's arguments to every process, so it imports little."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.config import DSparkConfig


@dataclass(frozen=True)
class Serving:
    """Of a server that decodes with DSPARK.

    Attributes:
        config: our options.
        confidence_head: whether the drafter has one.
        dummy_draft: whether the drafter's weights are random.
    """

    config: DSparkConfig
    confidence_head: bool
    dummy_draft: bool


@dataclass(frozen=True)
class TargetOnly:
    """Of a server that was to decode with DSPARK and does not.

    Attributes:
        reason: why.
    """

    reason: str
