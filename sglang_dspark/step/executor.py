"""What runs a decode step, and what the server does in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dspark_kernels import Accepted

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import Copies, DecodeBatch, DraftOutput, TargetOutput, VerifyPlan


def _do_nothing(*_given: object) -> None:
    """Stand for a hook that is not needed."""


@dataclass(frozen=True)
class StepHooks:
    """What the server does between the stages of a step; nothing by default.

    Attributes:
        before_verify: reads the plan, before the target's forward is launched.
        after_verify: checks and adjusts the logits [N, V] of the plan's rows, in place.
        publish: hands the new lengths [bs] to the engine, as soon as the device knows them.
    """

    before_verify: Callable[[VerifyPlan], None] = _do_nothing
    after_verify: Callable[[VerifyPlan, torch.Tensor], None] = _do_nothing
    publish: Callable[[torch.Tensor], None] = _do_nothing


@dataclass(frozen=True)
class StepOutcome:
    """What a step has drafted, verified and accepted; the next step may overwrite its tensors.

    Attributes:
        draft: proposals for all requests.
        plan: the tokens that were verified.
        target: their logits, if anything reads these after the step.
        accepted: what became of the drafts.
    """

    draft: DraftOutput
    plan: VerifyPlan
    target: TargetOutput
    accepted: Accepted


class StepExecutor(ABC):
    """Runs decode steps. Measurements call :meth:`stage`, :meth:`draft` and :meth:`finish` one by one.

    Attributes:
        in_graphs: whether stages are replayed from CUDA graphs.
    """

    in_graphs: bool

    def run(self, step: DecodeBatch, decision: StepDecision, copies: Copies | None, hooks: StepHooks) -> StepOutcome:
        """Draft, plan, verify, accept, publish and commit.

        Args:
            copies: drafts that presets propose in place of some.
        """
        self.stage(step, decision)
        draft = self.draft(step, decision).with_copies(copies)
        return self.finish(step, decision, draft, hooks)

    @abstractmethod
    def stage(self, step: DecodeBatch, decision: StepDecision) -> None:
        """Copy the step to where the stages read it, if that is a fixed place."""

    @abstractmethod
    def draft(self, step: DecodeBatch, decision: StepDecision) -> DraftOutput:
        """Propose a block for the requests that the decision names; nothing for a plain step."""

    @abstractmethod
    def finish(self, step: DecodeBatch, decision: StepDecision, draft: DraftOutput, hooks: StepHooks) -> StepOutcome:
        """Plan, verify, accept, publish and commit what was drafted."""
