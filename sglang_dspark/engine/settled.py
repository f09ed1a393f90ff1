"""What start-up has settled about a server. It travels on SGLang's arguments to every process."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.resolved import ResolvedDrafter


@dataclass(frozen=True)
class Serving:
    """Of a server that decodes with DSPARK.

    Attributes:
        config: our options.
        drafter: None where none is served.
        dummy_draft: whether its weights are random.
    """

    config: DSparkConfig
    drafter: ResolvedDrafter | None
    dummy_draft: bool


@dataclass(frozen=True)
class TargetOnly:
    """Of a server that was to decode with DSPARK and does not.

    Attributes:
        reason: why.
    """

    reason: str
