"""Two attention backends in one: SGLang's own for prompts, ours for verification."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend


class PhasedBackend(HybridAttnBackend):
    """What SGLang has chosen encodes prompts, exactly as on a server without DSPARK; ``verify`` does the rest.

    Unlike the base class it does not ask ``--speculative-attention-mode``: every decode forward is a verification.

    Args:
        model_runner: SGLang's, of the target, with the backend that it has made.
        verify: attention of TARGET_VERIFY.
    """

    def __init__(self, model_runner: Any, verify: AttentionBackend) -> None:
        prefill = model_runner.attn_backend
        super().__init__(model_runner, prefill_backend=prefill, decode_backend=verify)
        # SGLang would copy the lengths of every decode step to the host; prompts bring their own.
        self.needs_cpu_seq_lens = False
        self.prefill_attention_backend_str = model_runner.prefill_attention_backend_str
        self.decode_attention_backend_str = verify.decode_attention_backend_str
        self.use_captured_forward_metadata_for_breakable_cuda_graph = (
            prefill.use_captured_forward_metadata_for_breakable_cuda_graph
        )

    def _select_backend(self, forward_mode: Any) -> AttentionBackend:
        verifies = forward_mode.is_target_verify() or forward_mode.is_decode_or_idle()
        return self.decode_backend if verifies else self.prefill_backend

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        """As the backend of prompts does it: no other forward is captured so."""
        return self.prefill_backend.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> None:
        """As the backend of prompts does it."""
        self.prefill_backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(*args, **kwargs)
