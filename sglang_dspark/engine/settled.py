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
        holds_prompts: whether prompts are held back by our rule: SGLang's was not asked for.
    """

    config: DSparkConfig
    drafter: ResolvedDrafter | None
    dummy_draft: bool
    holds_prompts: bool = True


@dataclass(frozen=True)
class TargetOnly:
    """Of a server that was to decode with DSPARK and does not.

    Attributes:
        reason: why.
    """

    reason: str
