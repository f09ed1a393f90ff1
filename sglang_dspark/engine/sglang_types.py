"""SGLang's objects as far as we touch them. mypy holds our code to these fields; it does not read SGLang itself.

A release that renames one of them breaks us where the field is used: this is the list of what to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import BaseFinishReason, MultimodalInputs, ReqKvInfo
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner
    from sglang.srt.model_executor.runner.base_runner import BaseRunner
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    from sglang.srt.session.session_controller import Session
    from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpecInput
    from sglang.srt.state_capturer.base import TopkCaptureOutput
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
    from transformers import PreTrainedTokenizerBase

Answer = dict[str, Any]
"""A message of the front end about one request, as ``/generate`` returns it."""


class ServerArgs(Protocol):
    """``sglang.srt.server_args.ServerArgs``: what the operator wrote. Fields have the names of the flags."""

    model_path: str
    revision: str | None
    download_dir: str | None
    load_format: str
    device: str | None
    nnodes: int
    dp_size: int
    tokenizer_worker_num: int
    api_key: str | None
    fastapi_root_path: str
    attention_backend: str | None
    prefill_attention_backend: str | None
    decode_attention_backend: str | None
    kv_cache_dtype: str
    page_size: int | None
    max_running_requests: int | None
    min_free_slots_delay: int | None
    enable_hierarchical_cache: bool
    cuda_graph_backend_prefill: str | None
    enable_deterministic_inference: bool
    enable_dp_attention: bool
    enable_lora: bool | None
    enable_memory_saver: bool
    enable_mixed_chunk: bool
    chunked_prefill_size: int
    enable_return_routed_experts: bool
    enable_return_hidden_states: bool
    return_hidden_states_mode: str | None
    tp_size: int
    mamba_radix_cache_strategy: str
    mamba_track_interval: int
    linear_attn_backend: str
    lora_paths: Any
    lora_backend: str
    moe_runner_backend: str
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
    stream_interval: int
    served_model_name: str | None
    trust_remote_code: bool
    json_model_override_args: str
    cuda_graph_config: CudaGraphConfig
    disable_overlap_schedule: bool
    disaggregation_mode: str
    attn_dp_size: int
    enable_metrics: bool
    enable_pdmux: bool
    enable_two_batch_overlap: bool
    pp_size: int
    speculative_attention_mode: str
    tool_call_parser: str | None
    reasoning_parser: str | None
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
    is_hybrid_swa: bool
    is_multimodal: bool
    model_is_mrope: bool


class ModelRunner(Protocol):
    """``sglang.srt.model_executor.model_runner.ModelRunner``, of the target."""

    model: Any  # of the target's family
    model_config: ModelConfig
    server_args: ServerArgs
    spec_algorithm: CustomSpecAlgo
    device: str
    forward_stream: torch.cuda.Stream
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    page_size: int
    max_running_requests: int
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVCache
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    attn_backend: AttentionBackend
    kv_index_translator: KVIndexTranslator
    decode_cuda_graph_runner: BaseCudaGraphRunner
    prefill_cuda_graph_runner: BaseCudaGraphRunner
    eager_runner: BaseRunner
    graph_shared_output: GraphSharedOutput
    prefill_attention_backend_str: str
    lora_manager: LoRAManager
    weight_updater: WeightUpdater
    memory_saver_adapter: TorchMemorySaverAdapter
    mrope_deltas: torch.Tensor  # ours


class SpecAuxConfig(Protocol):
    """``sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig``."""

    dflash_use_aux_hidden_state: bool
    dflash_target_layer_ids: list[int]
    dflash_draft_num_layers: int


class KVCacheConfigurator(Protocol):
    """``sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator``: sizes the pools of K/V."""

    server_args: ServerArgs
    model_dtype: torch.dtype
    spec_aux_config: SpecAuxConfig
    dflash_draft_cell_size_per_token: int


class LinearLayer(Protocol):
    """``sglang.srt.layers.linear.LinearBase`` or ``ParallelLMHead`` without quantisation."""

    weight: torch.Tensor
    quant_method: object


class TpModelWorker(Protocol):
    """``sglang.srt.managers.tp_worker.TpModelWorker``: runs the target."""

    model_runner: ModelRunner
    server_args: ServerArgs
    device: str
    random_seed: int
    tokenizer: PreTrainedTokenizerBase

    def forward_batch_generation(
        self,
        batch: ScheduleBatch | None,
        forward_batch: ForwardBatch | None = None,
        *,
        is_verify: bool = False,
        skip_attn_backend_init: bool = False,
    ) -> GenerationBatchResult:
        """Run the target; a verification leaves tokens to the caller."""


class SamplingParams(Protocol):
    """``sglang.srt.sampling.sampling_params.SamplingParams``, of one request."""

    custom_params: Any  # whatever the client has sent
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    sampling_seed: int | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_new_tokens: int
    min_new_tokens: int
    stop_strs: list[str]
    stop_regex_strs: list[str]
    logit_bias: Mapping[str, float] | None
    stop_token_ids: set[int] | None


class Req(Protocol):
    """``sglang.srt.managers.schedule_batch.Req``: a request in the scheduler."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: list[int]
    output_ids_through_stop: Sequence[int]
    sampling_params: SamplingParams
    grammar: BaseGrammarObject
    tokenizer: PreTrainedTokenizerBase
    kv: ReqKvInfo
    lora_id: str | None
    eos_token_ids: set[int] | None
    customized_info: dict[str, list[object]] | None
    decode_batch_idx: int
    require_reasoning: bool
    reasoning_tokens: int
    _is_reasoning_over: bool
    finished_len: int | None
    session: Session | None
    finished_reason: BaseFinishReason
    to_finish: BaseFinishReason
    extra_key: str | None
    cache_salt: str | None
    is_retracted: bool
    return_logprob: bool
    seqlen: int
    time_stats: SchedulerReqTimeStats
    spec_verify_ct: int
    spec_num_cap_tokens: int
    update_finish_state: Callable[..., None]
    update_spec_correct_drafts_histogram: Callable[[int], None]
    update_spec_cap_lens_histogram: Callable[[int], None]

    def finished(self) -> bool:
        """Return whether the text is complete."""

    def get_fill_ids(self) -> Sequence[int]:
        """Return the tokens of the prompt and the output."""

    def tail_str(self, new_accepted_len: int) -> str:
        """Return the end of the text, in which a stop string may be."""


class ScheduleBatch(Protocol):
    """``sglang.srt.managers.schedule_batch.ScheduleBatch``: what the scheduler runs at once."""

    reqs: Sequence[Req]
    decoding_reqs: Sequence[Req] | None
    forward_mode: ForwardMode
    forward_iter: int
    is_prefill_only: bool
    is_extend_in_batch: bool
    has_grammar: bool
    return_logprob: bool
    return_hidden_states: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]
    device: str
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    orig_seq_lens: torch.Tensor
    input_ids: torch.Tensor
    input_embeds: torch.Tensor | None
    prefix_lens: list[int]
    extend_lens: list[int]
    extend_num_tokens: int
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    spec_info: SpecInput
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    tree_cache: BasePrefixCache
    multimodal_inputs: list[MultimodalInputs | None]
    mamba_track_indices: torch.Tensor
    hicache_consumer_index: int

    def maybe_evict_swa(self) -> None:
        """Free the K/V that no window sees any more."""


class ForwardBatch(Protocol):
    """``sglang.srt.model_executor.forward_batch_info.ForwardBatch``: what one forward of the target reads."""

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    spec_info: SpecInput
    mm_input_embeds: torch.Tensor | None
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int] | None  # of prompts
    mamba_track_indices: torch.Tensor | None
    lora_ids: list[str | None]
    dp_padding_mode: DpPaddingMode


class GenerationBatchResult(Protocol):
    """``sglang.srt.managers.utils.GenerationBatchResult``: what a worker returns to the scheduler."""

    logits_output: LogitsProcessorOutput
    next_token_ids: torch.Tensor
    new_seq_lens: torch.Tensor
    next_draft_input: SpecInput
    routed_experts_output: TopkCaptureOutput | None
    copy_done: torch.cuda.Event | None


class TokenizerManager(Protocol):
    """``sglang.srt.managers.tokenizer_manager.TokenizerManager``: tokenizes requests, and talks to the scheduler."""

    server_args: ServerArgs
    model_config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    incremental_streaming_output: bool

    def auto_create_handle_loop(self) -> None:
        """Start to read answers of the scheduler, if nothing reads them yet."""

    async def get_internal_state_communicator(self, request: Any) -> Sequence[Any]:
        """Send a question to the scheduler, and return its answers, that of rank 0 first."""
