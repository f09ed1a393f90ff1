"""Rows of a verification in which each request has its own number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.step.decision import StepDecision


@dataclass(frozen=True)
class CapturedRows:
    """The sizes of verifications that are captured as CUDA graphs.

    Attributes:
        window: the most rows of a request, its anchor included.
        tiers: rows of the captured forwards, ascending; empty where none is captured, and any number will do.
        requests: most requests of a captured forward.
    """

    window: int
    tiers: Sequence[int] = ()
    requests: int = 0

    lengths = None

    @classmethod
    def of(cls, runner: ModelRunner, window: int) -> Self:
        """Return those of the target's runner."""
        graphs = runner.decode_cuda_graph_runner
        if graphs is None:
            return cls(window)
        return cls(window, tuple(graphs.capture_num_tokens), int(graphs.max_bs))

    @property
    def digest(self) -> str:
        """Return what step times depend on."""
        return f"rows by request: {','.join(map(str, self.tiers))}"

    def fit(self, requests: int) -> bool:
        """Return whether so many requests may verify as many rows as they like."""
        return not self.tiers or (requests <= self.requests and requests * self.window <= self.tiers[-1])

    def take(self, proposal: Any, decision: StepDecision, requests: int) -> Any:
        """Return the proposal that is verified: as it is, since rows are chosen when they are laid out."""
        return proposal

    def lay_out(self, lens: torch.Tensor, total: int | None) -> tuple[RaggedVerifyLayout, int]:
        """Return the layout of ``lens`` [bs] rows per request, and how many rows that are, padding included.

        Args:
            total: their sum, or a bound on it; None if only the device knows.
        """
        if self.tiers:
            rows = round_up_grid(len(lens) * self.window if total is None else total, self.tiers)
            return RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=rows), rows
        on_host = lens.tolist()
        rows = sum(on_host)
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=on_host, device=lens.device, grid=[rows]), rows

    def release(self) -> None:
        """Do nothing: a step leaves nothing behind."""
