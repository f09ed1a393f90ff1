"""Lays out the rows of a verification as SGLang's own worker takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid


@dataclass(frozen=True)
class CapturedRows:
    """The sizes of verifications that are captured as CUDA graphs.

    Attributes:
        window: rows of a request at most, its anchor included.
        tiers: rows of the captured forwards, ascending; empty where none is captured, and any number will do.
        requests: most requests of a captured forward.
    """

    window: int
    tiers: Sequence[int] = ()
    requests: int = 0

    @classmethod
    def of(cls, runner: Any, window: int) -> CapturedRows:
        """Return those of the target's runner."""
        graphs = runner.decode_cuda_graph_runner
        if graphs is None or not graphs.ragged_verify_mode:
            return cls(window)
        return cls(window, tuple(graphs.capture_num_tokens), int(graphs.max_bs))

    def fit(self, requests: int) -> bool:
        """Return whether so many requests may verify as many rows as they like."""
        return not self.tiers or (requests <= self.requests and requests * self.window <= self.tiers[-1])

    def lay_out(self, lens: torch.Tensor, total: int | None) -> RaggedVerifyLayout:
        """Return the layout of ``lens`` [bs] rows per request.

        Args:
            total: their sum, or a bound on it; None if only the device knows.
        """
        if self.tiers:
            rows = round_up_grid(len(lens) * self.window if total is None else total, self.tiers)
            return RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=rows)
        on_host = lens.tolist()
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=on_host, device=lens.device, grid=[sum(on_host)])
