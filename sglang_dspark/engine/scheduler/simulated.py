"""Simulated acceptance on a server: its draws, and the keys of the requests that they depend on."""

import logging
from array import array
from collections.abc import Sequence
from zlib import crc32

import torch
from dspark_kernels import SimulatedDraws

from sglang_dspark.calibration.acceptance_law import acceptance_law
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.sglang_types import ModelRunner, ScheduleBatch
from sglang_dspark.step.transfers import host_index

logger = logging.getLogger(__name__)


class SimulatedAcceptance(Part):
    """The draws of a server whose drafts are kept by chance.

    Args:
        rates: of keeping a draft, by slot, when all before it are kept.
    """

    def __init__(self, rates: Sequence[float], runner: ModelRunner) -> None:
        logger.warning("DSPARK: acceptance is simulated (%s): texts mean nothing, step times do", rates)
        self._device = torch.device(runner.device)
        rows = len(runner.req_to_token_pool.req_to_token)
        keys = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self.draws = SimulatedDraws(keys, torch.from_numpy(acceptance_law(rates)).to(self._device))

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        """Note the keys of requests, which follow from their prompts."""
        keys = [crc32(array("q", req.origin_input_ids).tobytes()) for req in batch.reqs]
        self.draws.keys[batch.req_pool_indices] = host_index(keys, self._device)
