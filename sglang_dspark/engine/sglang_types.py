"""SGLang's objects as far as we touch them. mypy holds our code to these fields; it does not read SGLang itself.

A release that renames one of them breaks us where the field is used: this is the list of what to look for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class ServerArgs(Protocol):
    """``sglang.srt.server_args.ServerArgs``: what the operator wrote. Fields have the names of the flags."""

    model_path: str
    revision: str | None
    download_dir: str | None
    load_format: str
    device: str | None
    nnodes: int
    api_key: str | None
    fastapi_root_path: str
    attention_backend: str | None
    prefill_attention_backend: str | None
    decode_attention_backend: str | None
    sampling_backend: str | None
    cuda_graph_backend_prefill: str | None
    kv_cache_dtype: str
    page_size: int | None
    max_running_requests: int | None
    min_free_slots_delay: int | None
    enable_hierarchical_cache: bool
    enable_lora: bool | None
    tp_size: int
    mamba_radix_cache_strategy: str
    mamba_track_interval: int
    linear_attn_backend: str
    linear_attn_prefill_backend: str | None
    lora_paths: Any
    lora_backend: str
    speculative_algorithm: str | None
    speculative_num_draft_tokens: int | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_draft_model_quantization: str | None
    speculative_draft_load_format: str | None
    speculative_draft_window_size: int | None
    speculative_draft_sink_size: int | None
    tokenizer_metrics_allowed_custom_labels: list[str] | None


class ModelConfig(Protocol):
    """``sglang.srt.configs.model_config.ModelConfig``, of the target."""

    hf_config: Any  # transformers' configuration
    hf_text_config: Any  # of the part that reads text
    dtype: torch.dtype
    quantization: str | None
    head_dim: int
    context_len: int
    vocab_size: int
    has_attention_sinks: bool
    is_hybrid_swa: bool


class ModelRunner(Protocol):
    """``sglang.srt.model_executor.model_runner.ModelRunner``, of the target."""

    model: Any
    model_config: ModelConfig
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype


class SamplingParams(Protocol):
    """``sglang.srt.sampling.sampling_params.SamplingParams``, of one request."""

    custom_params: Any  # whatever the client has sent
    top_k: int
    min_new_tokens: int
    logit_bias: Mapping[str, float] | None
    stop_token_ids: set[int] | None


class Req(Protocol):
    """``sglang.srt.managers.schedule_batch.Req``: a request in the scheduler."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: list[int]


class ScheduleBatch(Protocol):
    """``sglang.srt.managers.schedule_batch.ScheduleBatch``: what the scheduler runs at once."""

    reqs: Sequence[Req]


class TokenizerManager(Protocol):
    """``sglang.srt.managers.tokenizer_manager.TokenizerManager``: tokenizes requests, and talks to the scheduler."""

    server_args: ServerArgs
    model_config: ModelConfig
    tokenizer: Any

    def auto_create_handle_loop(self) -> None:
        """Start to read answers of the scheduler, if nothing reads them yet."""

    async def get_internal_state_communicator(self, request: Any) -> Sequence[Any]:
        """Send a question to the scheduler, and return its answers, that of rank 0 first."""
