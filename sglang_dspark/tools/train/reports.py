"""What a run says of itself while it trains: means over steps, in ``log.jsonl`` and beside it for TensorBoard."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.tools.train.anchors import AnchorBatch
from sglang_dspark.tools.train.loss import LossOutput
from sglang_dspark.tools.train.parallel import Processes
from sglang_dspark.tools.train.run_folder import LOG_FILE

TENSORBOARD_DIR = "tensorboard"
_TERMS = ("loss", "ce", "l1", "confidence")


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
    seconds: float  # that the run has trained, earlier parts included
    held_out: bool = False


class Sums:
    """Sums over the pieces that this process has read, of one step or of several."""

    def __init__(self, gamma: int, device: torch.device) -> None:
        self._values = torch.zeros(len(_TERMS) + 3 * gamma, dtype=torch.float64, device=device)
        self._gamma = gamma
        self._weight = 0.0

    def add_step(self, total_weight: float) -> None:
        """A step of this weight begins; all processes count all steps."""
        self._weight += total_weight

    def add_piece(self, output: LossOutput, batch: AnchorBatch, total_weight: float) -> None:
        """Count a piece of a step of this weight. Does not wait for the device."""
        terms = torch.stack([getattr(output, name).detach() for name in _TERMS]) * total_weight
        accepted = output.acceptance
        # Not supervised slots, which end a block, have an acceptance of 0, and so do the products behind them.
        parts = (terms, *(x.sum((0, 1)) for x in (accepted, batch.supervised, accepted.cumprod(-1))))
        self._values += torch.cat([part.to(self._values.dtype) for part in parts])

    def report(self, step: int, seconds: float, processes: Processes, *, held_out: bool) -> StepReport:
        """The means over all processes, each of which has to ask."""
        processes.add_up([self._values])
        numbers = self._values.cpu()
        accepted, supervised, survived = numbers[len(_TERMS) :].split(self._gamma)
        # A slot that no block reaches has nothing accepted: 0 of 0 would be no number, and no accept length beats that.
        supervised = supervised.clamp(min=1)
        return StepReport(
            step=step,
            **dict(zip(_TERMS, (numbers[: len(_TERMS)] / self._weight).tolist(), strict=True)),
            acceptance=tuple((accepted / supervised).tolist()),
            tau=1 + float((survived / supervised).sum()),
            seconds=seconds,
            held_out=held_out,
        )


class Log:
    """The files of a run that grow with its reports.

    TensorBoard's are written where torch can: its package ``tensorboard`` is not one that SGLang brings.

    Args:
        step: steps done. What an earlier part of the run has drawn of later ones, TensorBoard no longer shows.
    """

    def __init__(self, out_dir: Path, step: int) -> None:
        self._path = out_dir / LOG_FILE
        out_dir.mkdir(parents=True, exist_ok=True)
        self._board: Any = None
        if has_tensorboard():
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out_dir / TENSORBOARD_DIR), purge_step=step + 1)

    def write(self, report: StepReport) -> None:
        """Add a line, and a point to each curve."""
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(vars(report)) + "\n")
        if self._board is not None:
            kind = "held_out" if report.held_out else "training"
            for name in (*_TERMS, "tau"):
                self._board.add_scalar(f"{kind}/{name}", getattr(report, name), report.step)
            for slot, rate in enumerate(report.acceptance, start=1):
                self._board.add_scalar(f"{kind}_acceptance/{slot}", rate, report.step)
            self._board.flush()


def has_tensorboard() -> bool:
    """Whether torch can write files for TensorBoard."""
    return find_spec("tensorboard") is not None
