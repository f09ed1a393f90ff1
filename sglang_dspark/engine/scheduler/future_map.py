"""SGLang's relay of per-request values between overlapped steps: written by CUDA graphs, and fit for the CPU."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from dspark_kernels import AcceptResult
from sglang.srt.managers.overlap_utils import FutureMap


class Relay:
    """Memory of a future map that is there before it, so that graphs can be captured that write to it.

    A graph enters what became of its step after everything of that step has read the values before. The map skips its
    own writing for tensors that a graph has entered, and records its event behind the replay. Row 0 of the pool is
    no request's: padding is written there.

    Attributes:
        tokens, lens: [rows of req_to_token] int64, last committed token and tokens whose K/V is committed.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tokens, self.lens = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._entered: dict[int, torch.Tensor] = {}

    def enter(self, rows: torch.Tensor, accepted: AcceptResult) -> None:
        """Write the outcome of a step of [n] ``rows``; captured."""
        self.lens[rows] = accepted.new_seq_lens
        self.tokens[rows] = accepted.bonus_tokens

    def entered(self, accepted: AcceptResult) -> None:
        """Take note that a graph has just entered this outcome, whose tensors are its own and no other's."""
        for tensor in (accepted.new_seq_lens, accepted.bonus_tokens):
            self._entered[id(tensor)] = tensor  # held, so that its id is never another one's

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is the very one that a graph has entered."""
        return id(tensor) in self._entered


_RELAYS: WeakKeyDictionary[Any, Relay] = WeakKeyDictionary()


def relay_of(req_to_token_pool: Any, device: torch.device) -> Relay:
    """The memory that the future map of a pool is going to have."""
    if req_to_token_pool not in _RELAYS:
        _RELAYS[req_to_token_pool] = Relay(req_to_token_pool.req_to_token.shape[0], device)
    return _RELAYS[req_to_token_pool]


class RelayedFutureMap(FutureMap):
    """``FutureMap`` in the memory of a relay, where there is one for its pool."""

    publish_ready: Any

    def __init__(self, device: Any, spec_algo: Any, req_to_token_pool: Any, *args: Any, **wishes: Any) -> None:
        super().__init__(device, spec_algo, req_to_token_pool, *args, **wishes)
        self._entries = _RELAYS.get(req_to_token_pool)
        if self._entries is not None:
            self.output_tokens_buf, self.new_seq_lens_buf = self._entries.tokens, self._entries.lens

    def publish(self, future_indices: Any, new_seq_lens: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Make committed lengths known; those that a graph has entered need nothing but the event."""
        if self._entries is None or not self._entries.has(new_seq_lens):
            super().publish(future_indices, new_seq_lens, *args, **kwargs)
            return
        if self.publish_ready is None:
            self.publish_ready = torch.get_device_module(self.device).Event()
        self.publish_ready.record()
        self._publish_fresh = True  # SGLang asserts that every reading follows a publication

    def stash(self, future_indices: Any, payload: Any) -> None:
        """Keep the next step's anchors, where no graph has entered them."""
        if self._entries is None or not self._entries.has(payload.bonus_tokens):
            super().stash(future_indices, payload)


class CpuFutureMap(RelayedFutureMap):
    """For CPU tensors, which know no streams."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        # The base class calls Tensor.record_stream, which raises for CPU tensors. Of the relayed values DSPARK uses
        # only the bonus token, so there is nothing else to resolve.
        draft_input = batch.spec_info
        if draft_input is not None and draft_input.future_indices.shape[0] > 0:
            draft_input.bonus_tokens = self.output_tokens_buf[draft_input.future_indices]


def create_future_map(device: Any, *args: Any, **wishes: Any) -> FutureMap:
    """The relay for ``device``, with SGLang's further arguments for one."""
    cls = CpuFutureMap if torch.device(device).type == "cpu" else RelayedFutureMap
    return cls(device, *args, **wishes)
