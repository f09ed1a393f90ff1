"""SGLang's relay of per-request values between overlapped steps, as CUDA graphs write to it."""

import torch
from dspark_kernels import AcceptResult
from sglang.srt.managers.overlap_utils import FutureRelayBuffers, offer_future_relay_buffers


class Relay:
    """Buffers that SGLang's future map adopts when it is made, after graphs were captured that write to them.

    A graph writes the outcome of its step after everything of that step has read the values before. The map then skips
    its own writing of that outcome, and records its event behind the replay. Row 0 of the pool is no request's: padding
    is written there.

    Args:
        rows: of ``req_to_token``.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.buffers = FutureRelayBuffers(req_pool_size=rows, device=device)
        offer_future_relay_buffers(self.buffers)

    def write(self, rows: torch.Tensor, accepted: AcceptResult) -> None:
        """Write the outcome of a step of [n] ``rows``; captured."""
        self.buffers.new_seq_lens[rows] = accepted.new_seq_lens
        self.buffers.output_tokens[rows] = accepted.bonus_tokens

    def was_written(self, accepted: AcceptResult) -> None:
        """Let the map know that a graph has just written this outcome, which is published next."""
        self.buffers.published_seq_lens = accepted.new_seq_lens
        self.buffers.published_bonus = accepted.bonus_tokens
