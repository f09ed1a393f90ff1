"""Serving without a drafter: steps are plain but for the drafts that presets copy."""

from __future__ import annotations

import logging
from typing import Any

import torch
from dspark_kernels import Accepted

from sglang_dspark.step.state import VerifyPlan
from sglang_dspark.worker.worker import DSparkWorker

logger = logging.getLogger(__name__)


class DraftFreeWorker(DSparkWorker):
    """A worker whose policies draft nothing, so that of a step's stages those of the drafter have nothing to do.

    Requests without a preset decode as on a server without speculation. There is no draft K/V, and nothing is read from
    the target's layers.
    """

    mask_token_id = 0  # of staged blocks that nobody reads

    def load_drafter(self) -> int:
        logger.info("DSPARK: no drafter; requests with a preset speculate")
        return self.options.gamma(None)

    def make_calibration(self) -> None:
        return None

    def describe_drafter(self) -> None:
        return None

    @property
    def graph_depth(self) -> int:
        """Plain steps only: those with copied drafts are launched."""
        return 0

    def allocate_draft_cache(self, num_slots: int) -> Any:
        return None

    def prepare_to_serve(self) -> None:
        if self.on_gpu:
            self.graphs = self.capture_graphs()
        self.schedule.start(None)
        self.announce()

    def commit(self, plan: VerifyPlan, accepted: Accepted, captured: torch.Tensor) -> None:
        """The target's K/V is all there is."""

    def inject_context(self, *rows: Any) -> None:
        """Likewise."""
