"""The optimizer of a run, and the course of its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.tools.train.config import TrainConfig


class Optimizer:
    """AdamW; or Muon for the matrices between hidden states, and AdamW for everything else.

    Muon makes the update of a matrix orthogonal (K. Jordan et al., 2024). torch scales its updates to the size of
    AdamW's, so one learning rate serves both.
    """

    def __init__(self, model: DraftModel, config: TrainConfig) -> None:
        per_token = (
            []
            if model.markov_head is None
            else [model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight]
        )
        others = [p for p in model.parameters() if not any(p is q for q in per_token)]
        # A projection to one number, as the confidence head's, has nothing to make orthogonal.
        matrices = [p for p in others if p.dim() == 2 and min(p.shape) > 1] if config.optimizer == "muon" else []
        rest = [p for p in others if not any(p is q for q in matrices)]
        groups: list[dict[str, Any]] = [{"params": rest, "peak_lr": config.learning_rate}]
        if per_token:
            groups.append({"params": per_token, "peak_lr": config.learning_rate * config.markov_lr_scale})
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=True)
        ]
        if matrices:
            muon = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            muon.param_groups[0]["peak_lr"] = config.learning_rate
            self._all.append(muon)
        self._parameters: list[Tensor] = list(model.parameters())
        self._grad_clip = config.grad_clip

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts."""
        return [group for part in self._all for group in part.param_groups]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._all:
            part.zero_grad(set_to_none=True)

    def step(self, factor: float) -> None:
        """Clip the gradients and apply them, at ``factor`` times the peak learning rates."""
        torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * factor
        for part in self._all:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each part."""
        return [part.state_dict() for part in self._all]

    def load_state_dict(self, states: Any) -> None:
        """Go on from `state_dict`, or from that of an earlier release, which had AdamW alone."""
        for part, state in zip(self._all, [states] if isinstance(states, dict) else states, strict=True):
            part.load_state_dict(state)


def learning_rate_factor(config: TrainConfig, position: float, start: float = 0.0) -> float:
    """Factor on the peak learning rates at this step: linear from 0 over the warm-up, then the schedule to the end.

    Args:
        position: of the step, of ``config.steps``.
        start: where the warm-up begins.
    """
    warmup = max(1, round(config.steps * config.warmup_share))
    risen = position - start
    if risen < warmup:
        return (risen + 1) / warmup
    done = min((risen - warmup) / max(1, config.steps - start - warmup), 1.0)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.schedule]
