"""How far a run has come, and which of its checkpoints is the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_dspark.tools.train.config import TrainConfig


@dataclass
class Progress:
    """Everything here is the same in all processes, and outlives an interruption."""

    step: int = 0  # steps done
    seconds: float = 0.0  # that the run has trained
    first_seconds: float = 0.0  # of them, of the first step
    saved_step: int = -1  # of the last checkpoint
    saved_seconds: float = 0.0  # when that was written
    saving_seconds: float = 0.0  # that measuring and writing it took
    best_step: int = -1  # of the checkpoint with the longest held-out accept length
    best_tau: float = 0.0
    worse: int = 0  # measurements since then

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """From the state of a run; one of an earlier release knows only where it was, and kept its last drafter."""
        known = {field.name: state[field.name] for field in fields(cls) if field.name in state}
        return cls(**{"saved_step": state["step"]} | known)

    def position(self, config: TrainConfig) -> float:
        """Where the run is, in steps of its schedule."""
        if config.max_minutes is None:
            return self.step
        return max(self.step, config.steps * self.seconds / (60 * config.max_minutes))

    def start(self, config: TrainConfig) -> float:
        """Where the warm-up begins: by the clock, after the first step, in which a GPU's kernels are compiled."""
        if config.max_minutes is None:
            return 0.0
        if self.step == 0:
            return self.position(config)
        return max(0.0, config.steps * self.first_seconds / (60 * config.max_minutes) - 1)

    def is_over(self, config: TrainConfig) -> bool:
        """Whether steps, time or patience are used up."""
        tired = config.patience is not None and self.worse >= config.patience
        return tired or self.position(config) >= config.steps

    def shown(self, config: TrainConfig) -> tuple[int, int]:
        """What is done and what there is in total: steps, or seconds where the time ends the run."""
        if config.max_minutes is None:
            return self.step, config.steps
        total = 60 * config.max_minutes
        return int(min(self.position(config) / config.steps, 1.0) * total), int(total)

    def measured(self, tau: float) -> None:
        """A checkpoint is due with this held-out accept length."""
        self.saved_step, self.saved_seconds = self.step, self.seconds
        if self.best_step < 0 or tau > self.best_tau:
            self.best_step, self.best_tau, self.worse = self.step, tau, 0
        else:
            self.worse += 1

    def saved(self, began: float) -> None:
        """The checkpoint is written that was begun after ``began`` seconds of training."""
        self.saved_seconds, self.saving_seconds = self.seconds, self.seconds - began
