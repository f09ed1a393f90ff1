"""Report on a training run: means over steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator

from dspark_training.anchors import AnchorBatch
from dspark_training.loss import LossOutput

TERMS = ("loss", "ce", "l1", "confidence")


@dataclass(frozen=True)
class StepReport:
    """Weighted means over the slots since the last report, on training batches unless `held_out`."""

    step: int
    loss: float
    ce: float
    l1: float
    confidence: float
    acceptance: tuple[float, ...]  # [gamma] expected acceptance at each slot, given that all before it were accepted
    # Expected committed tokens per round: 1 + the mean over blocks of the products of acceptances up to each slot.
    tau: float
    held_out: bool

    def scalars(self) -> dict[str, float]:
        """Return the values for a tracker such as TensorBoard, by name."""
        kind = "held_out" if self.held_out else "training"
        terms = {f"{kind}/{name}": getattr(self, name) for name in (*TERMS, "tau")}
        slots = {f"{kind}_acceptance/{slot}": rate for slot, rate in enumerate(self.acceptance, start=1)}
        return terms | slots


class Sums:
    """Sums over the batches that this process has read since the last report."""

    def __init__(self, gamma: int, device: torch.device) -> None:
        self._values = torch.zeros(1 + len(TERMS) + 3 * gamma, dtype=torch.float64, device=device)
        self._gamma = gamma

    def add(self, output: LossOutput, batch: AnchorBatch) -> None:
        """Count a batch. Does not wait for the device."""
        terms = torch.stack([getattr(output, name).detach() for name in TERMS]) * output.weight
        accepted = output.acceptance
        # Slots that are not supervised end a block and have an acceptance of 0, and so do the products after them.
        slots = (x.sum((0, 1)) for x in (accepted, batch.supervised, accepted.cumprod(-1)))
        self._values += torch.cat([part.double() for part in (output.weight[None], terms, *slots)])

    def report(self, step: int, accelerator: Accelerator, *, held_out: bool) -> StepReport:
        """Return the means over all processes, each of which has to ask."""
        numbers = accelerator.reduce(self._values, reduction="sum").cpu()
        weight, terms, slots = numbers.split([1, len(TERMS), 3 * self._gamma])
        accepted, supervised, survived = slots.split(self._gamma)
        # A slot that no block reaches has nothing accepted: 0 / 0 is not a number, and no accept length is above that.
        supervised = supervised.clamp(min=1)
        loss, ce, l1, confidence = (terms / weight).tolist()
        return StepReport(
            step=step,
            loss=loss,
            ce=ce,
            l1=l1,
            confidence=confidence,
            acceptance=tuple((accepted / supervised).tolist()),
            tau=1 + float((survived / supervised).sum()),
            held_out=held_out,
        )
