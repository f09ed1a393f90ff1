"""Hold what start-up has decided about a server. It travels on SGLang's arguments to every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sglang_dspark.config import MOST_TAIL, DSparkConfig
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.draft.window import DraftWindow
from sglang_dspark.engine.sglang_types import SamplingParams, ServerArgs


@dataclass(frozen=True)
class DSparkServer:
    """A server that decodes with our worker.

    Attributes:
        config: our options.
        drafter: None if none is served.
        dummy_draft: whether its weights are random.
        draft_window: of the context, that the drafter sees; None for all that its layers see.
        adjusted: flags that the start has changed, with reasons.
    """

    config: DSparkConfig
    drafter: ResolvedDrafter | None
    dummy_draft: bool
    draft_window: DraftWindow | None = None
    adjusted: tuple[str, ...] = ()

    engine: ClassVar[str] = "plugin"
    takes_candidates: ClassVar[bool] = True

    @property
    def draft_path(self) -> str:
        """Return the folder of the drafter; empty if none is served."""
        return "" if self.drafter is None else self.drafter.path

    @property
    def timed(self) -> dict[str, str]:
        """Return what step times depend on beside the drafter's configuration, by name."""
        proposed = 0 if self.drafter is None else self.drafter.num_proposed
        return {
            "proposed": str(proposed),
            "draft_quantization": str(self.config.draft_quantization),
            "unproven": ",".join(sorted(self.config.unproven)),
        }

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the drafter says how likely a draft survives."""
        return self.drafter is not None and self.drafter.config.predicts_acceptance

    @property
    def gamma(self) -> int:
        """Return the drafts per request and step.

        Raises:
            ConfigError: our options ask for more than the drafter makes.
        """
        if self.drafter is None:
            return self.config.gamma(None)
        # Without confidences, nothing tells if the chain reaches a slot that only it can fill.
        return self.config.gamma(self.drafter.config.gamma, MOST_TAIL if self.has_confidence_head else 0)

    @property
    def window(self) -> int:
        """Return the tokens that a step verifies per request at most: the anchor, and drafts.

        Raises:
            ConfigError: our options ask for more drafts than a block has.
        """
        return self.config.max_verify(self.gamma) + 1


class OtherServer(Protocol):
    """A server that decodes with another worker than ours, by our schedule.

    Attributes:
        engine: value of ``--speculative-dspark-engine`` that asks for the worker.
        takes_candidates: whether it verifies drafts that are not its drafter's.
    """

    engine: ClassVar[str]
    takes_candidates: ClassVar[bool]

    def __init__(self, config: DSparkConfig) -> None:
        """Make the server as far as our options say it."""

    @property
    def config(self) -> DSparkConfig:
        """Return our options."""

    @property
    def reason(self) -> str:
        """Return why the worker decodes, and how."""

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the worker knows how likely a draft survives."""

    def resolve(self, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
        """Have SGLang resolve ``args`` for the worker, and attach the server to them.

        Raises:
            ConfigError: our options, the environment or the arguments ask for what the worker does not have.
            ValueError: SGLang refuses the worker.
        """

    def refusals(self, parameters: SamplingParams) -> Iterator[str]:
        """Yield a message for each parameter of a request that the worker would not follow."""


@dataclass(frozen=True)
class TargetOnly:
    """A server that was to decode with DSPARK, and decodes with the target alone.

    Attributes:
        reason: why.
    """

    reason: str


Attached = DSparkServer | OtherServer | TargetOnly
"""What DSPARK attaches to SGLang's arguments."""
