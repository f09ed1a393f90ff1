"""Which flags of SGLang DSPARK serves: one list, for the refusals and docs/sglang_flags.md.

Every flag of SGLang is named here, so that a new one is noticed when SGLang changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A flag that DSPARK serves with some values only.

    Attributes:
        name: the field of ``ServerArgs``.
        allowed: values that are served, the default among them.
        remedy: what to do instead.
        follows: the field whose value SGLang takes over where this flag is not given, so that it is served, too.
    """

    name: str
    allowed: tuple[Any, ...]
    remedy: str = "drop the flag"
    follows: str = ""

    def refuses(self, args: Any) -> bool:
        """Whether ``args`` have another value."""
        value = getattr(args, self.name)
        return value not in self.allowed and not (self.follows and value == getattr(args, self.follows))


PAGE_SIZES = (1, 16, 32, 64)
"""K/V slots per page that are served."""

HTTP = "drop the flag: requests are checked on their way through HTTP"
PARTS_OF_STATES = (
    "drop the flag: each rank would hold the hidden states of some tokens alone, and drafts are made from all"
)
OTHER_ALGORITHM = "drop the flag: DSPARK does not read it, it belongs to other speculative algorithms"

REFUSED_FLAGS: tuple[Refusal, ...] = (
    Refusal("pp_size", (1,), "pass --pp-size 1"),
    Refusal("dp_size", (1,), "pass --dp-size 1 and scale out with replicas behind a router"),
    Refusal("enable_dp_attention", (False,)),
    Refusal("attn_dp_size", (1,), "pass 1"),
    Refusal("dwdp_size", (1,), "pass 1"),
    Refusal("attn_cp_size", (1,), "pass 1"),
    Refusal("dcp_size", (1,), "pass 1"),
    Refusal("enable_lora_overlap_loading", (False, None), "drop the flag; adapters are served without it"),
    Refusal("disaggregation_mode", ("null",), "drop the flag: draft K/V is not handed on between servers"),
    Refusal("tokenizer_worker_num", (1,), "pass 1"),
    Refusal("page_size", (*PAGE_SIZES, None), "pass 1, 16, 32 or 64"),
    Refusal("enable_mixed_chunk", (False,)),
    Refusal("kv_cache_dtype", ("auto", "bfloat16", "bf16", "fp8_e4m3"), "pass auto, bfloat16 or fp8_e4m3"),
    Refusal("hicache_storage_backend", (None,), "drop the flag: prefixes move to host memory, and not beyond it"),
    Refusal("enable_lmcache", (False,)),
    Refusal("enable_flexkv", (False,)),
    Refusal("enable_unified_cache_external_linker", (False,)),
    Refusal("enable_kv_cache_sharding", (False,)),
    Refusal("moe_a2a_backend", ("none",), PARTS_OF_STATES),
    Refusal("moe_dense_tp_size", (None,), PARTS_OF_STATES),
    Refusal("enable_layernorm_sp", (False,), PARTS_OF_STATES),
    Refusal("enable_two_batch_overlap", (False,)),
    Refusal("enable_pdmux", (False,)),
    Refusal("grpc_mode", (False,), HTTP),
    Refusal("smg_grpc_mode", (False,), HTTP),
    Refusal("grpc_port", (None,), f"{HTTP}; SGLANG_GRPC_PORT sets it as well"),
    Refusal(
        "grammar_backend",
        ("xgrammar", "llguidance", "none"),
        "pass xgrammar, llguidance or none: drafts are tried out on a grammar that can go back",
    ),
    Refusal("enable_strict_thinking", (False,)),
    Refusal("enable_memory_saver", (False,)),
    Refusal(
        "enable_deterministic_inference",
        (False,),
        "drop the flag; requests with a seed are reproducible under DSPARK without it",
    ),
    Refusal("enable_unified_memory", (False,)),
    Refusal("enable_page_major_kv_layout", (False,)),
    Refusal("enable_hisparse", (False,)),
    Refusal("prefill_only_disable_kv_cache", (False,)),
    Refusal("dllm_algorithm", (None,)),
    Refusal("enable_streaming_session", (False,), "drop the flag; sessions without streaming are served"),
    Refusal("enable_return_routed_experts", (False,)),
    Refusal("enable_return_indexer_topk", (False,)),
    Refusal("enable_return_aux_hidden_states", (False,)),
    Refusal("enable_watermark", (False,)),
    Refusal(
        "enable_quant_communications",
        (False, None),
        "drop the flag: it makes sums of several ranks coarser in verification, and not in the steps of a plain server",
    ),
    Refusal("enable_torch_compile", (False,), "drop the flag: steps of DSPARK are not compiled"),
    Refusal("enable_nvidia_megakernel", (False,), "drop the flag: verification has kernels of its own"),
    Refusal(
        "startup_weight_load_mode",
        ("serial",),
        "pass serial: the drafter reads the target's weights before graphs are captured",
    ),
    Refusal("debug_cuda_graph", (False,), "drop the flag; --disable-cuda-graph runs steps launch by launch"),
    Refusal("cuda_graph_backend_decode", (None, "full", "disabled"), "pass full or disabled"),
    Refusal("enable_mis", (False,), "drop the flag and score items with a server without DSPARK"),
    Refusal("kv_canary", ("none",), "drop the flag: it does not know the rows that DSPARK verifies"),
    Refusal("rl_on_policy_target", (None,), "drop the flag: it asks for deterministic inference"),
    Refusal(
        "checkpoint_engine_wait_weights_before_ready",
        (False,),
        "drop the flag: the target's weights cannot be updated under DSPARK",
    ),
    Refusal("decrypted_draft_config_file", (None,), "drop the flag: DSPARK reads the drafter's own config.json"),
    Refusal("radix_cache_backend", (None,), "drop the flag: draft K/V exists in SGLang's own pool of slots alone"),
    Refusal("offload_group_size", (-1,), "drop the flag; --cpu-offload-gb is served"),
    Refusal("enable_multimodal", (None, False), "drop the flag: DSPARK serves text, and answers images with HTTP 400"),
    Refusal("use_ray", (False,), "drop the flag: schedulers have to be processes that load the plugin"),
    Refusal("speculative_num_steps", (None, 1), "drop the flag; --speculative-dspark-block-size shortens the block"),
    Refusal("speculative_eagle_topk", (None, 1), OTHER_ALGORITHM),
    Refusal("speculative_dflash_block_size", (None,), "pass --speculative-dspark-block-size"),
    Refusal("speculative_accept_threshold_single", (1.0,), "drop the flag: DSPARK keeps the target's law, always"),
    Refusal("speculative_accept_threshold_acc", (1.0,), "drop the flag: DSPARK keeps the target's law, always"),
    Refusal("speculative_use_rejection_sampling", (False,), "drop the flag: DSPARK always samples by rejection"),
    Refusal("speculative_use_block_verification", (False,)),
    Refusal("speculative_token_map", (None,), "drop the flag: a drafter of DSPARK brings draft_vocabulary.json along"),
    Refusal("speculative_attention_mode", ("prefill",), OTHER_ALGORITHM),
    Refusal("speculative_draft_attention_backend", (None,), "drop the flag: the drafter has an attention of its own"),
    Refusal("speculative_draft_window_size", (None,)),
    Refusal("speculative_draft_sink_size", (None,)),
    Refusal(
        "speculative_draft_kv_cache_dtype", (None,), "drop the flag: the drafter's K/V has the dtype of the weights"
    ),
    Refusal(
        "speculative_dspark_align_verify_tokens_to_graph_tier",
        (False,),
        "drop the flag: it belongs to SGLang's own DSPARK",
    ),
    Refusal("speculative_draft_model_quantization", (None, "unquant"), "serve an unquantised drafter"),
    Refusal("speculative_moe_runner_backend", (None, "auto"), OTHER_ALGORITHM, follows="moe_runner_backend"),
    Refusal("speculative_moe_a2a_backend", (None, "none"), OTHER_ALGORITHM),
    Refusal("enable_multi_layer_eagle", (False,), OTHER_ALGORITHM),
    Refusal("speculative_domino_candidate_pool_size", (2048,), OTHER_ALGORITHM),
    Refusal("speculative_dsa_topk_backend", ("sgl-kernel",), OTHER_ALGORITHM),
    Refusal("speculative_enable_w4a4_mxfp4_megamoe", (None,), OTHER_ALGORITHM),
    Refusal("uno_lora_path", (None,), OTHER_ALGORITHM),
    Refusal("speculative_adaptive", (False,), "drop the flag: the policy auto of DSPARK adapts by itself"),
    Refusal("speculative_adaptive_config", (None,), "drop the flag: the policy auto of DSPARK adapts by itself"),
    Refusal("decoupled_spec_bind_endpoint", (None,), OTHER_ALGORITHM),
    Refusal("decoupled_spec_connect_endpoints", (None,), OTHER_ALGORITHM),
    Refusal("decoupled_spec_rank", (None,), OTHER_ALGORITHM),
    Refusal("decoupled_spec_role", ("null",), OTHER_ALGORITHM),
    Refusal("spec_trace_dir", (None,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_min_bfs_breadth", (1,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_max_bfs_breadth", (10,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_match_type", ("BFS",), OTHER_ALGORITHM),
    Refusal("speculative_ngram_max_trie_depth", (18,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_capacity", (10_000_000,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_external_corpus_path", (None,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_external_sam_budget", (0,), OTHER_ALGORITHM),
    Refusal("speculative_ngram_external_corpus_max_tokens", (10_000_000,), OTHER_ALGORITHM),
)

CHECKED_ELSEWHERE = {
    "device": "`cpu` or `cuda`",
    "enable_lora": "served, but for adapters of experts",
    "lora_paths": "as `--enable-lora`",
    "enable_hierarchical_cache": "served on CUDA; draft K/V moves along",
    "lora_backend": "`csgmv` or `triton` on CUDA, `torch_native` on a CPU",
    "quantization": "served; where it covers the target's LM head or embedding, the drafter needs its own",
    "attention_backend": "`torch_native` on a CPU; `fa3`, `flashinfer` or `triton` on CUDA",
    "decode_attention_backend": "as `--attention-backend`",
    "prefill_attention_backend": "as `--attention-backend`",
    "moe_runner_backend": "served; `triton` was tried on a CPU besides the default; `flashinfer_megamoe` is refused",
    "sampling_backend": "accepted, without effect: all tokens are drawn by the law of `pytorch`",
    "cuda_graph_backend_prefill": "`breakable` or `disabled`",
    "cuda_graph_config": "as the flags that it stands for",
    "disable_cuda_graph_padding": "more sizes are captured; steps are padded all the same",
    "enable_profile_cuda_graph": "without effect: SGLang's own graphs of decode are not captured",
    "nnodes": "served; every node needs the drafter's files and the same options of DSPARK; tried with 2 on a CPU",
    "node_rank": "node 0 decides, answers requests and keeps step times; the others follow",
    "scheduler_recv_interval": "served; questions below `/dspark` wait as long",
    "enable_http2": "served by reading, not tried",
    "speculative_algorithm": "`DSPARK`",
    "speculative_draft_model_path": "the drafter; by default that in the target's own folder `dspark`; none with "
    "`--speculative-dspark-draft-free`",
    "speculative_draft_model_revision": "served",
    "speculative_draft_load_format": "`auto`, `safetensors` or `dummy`",
    "speculative_num_draft_tokens": "block size + 1, which is the default",
    "max_running_requests": "served; the default on CUDA is the largest batch of decode graphs, but no more than "
    "verify 2,048 tokens in a step, and at least 48",
    "min_free_slots_delay": "served; the default is 1, as on a plain server",
    "disable_overlap_schedule": "served",
    "num_continuous_decode_steps": "without effect, as with all speculative algorithms",
    "model_impl": "SGLang's own models; others fail at start-up",
    "disable_hybrid_swa_memory": "set by DSPARK: verification reads one K/V pool",
    "swa_full_tokens_ratio": "without effect, as with `--disable-hybrid-swa-memory`",
}
"""Flags with a rule of their own: what it says."""

SERVED_FLAGS = """
model_path tokenizer_path tokenizer_mode skip_tokenizer_init load_format trust_remote_code context_length revision
json_model_override_args dtype mem_fraction_static max_queued_requests max_total_tokens
chunked_prefill_size max_prefill_tokens schedule_policy enable_priority_scheduling schedule_conservativeness
disable_radix_cache nccl_port dist_timeout dist_init_addr tp_size random_seed watchdog_timeout host port
fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
enable_ssl_refresh api_key admin_api_key served_model_name weight_version chat_template hf_chat_template_name
completion_template enable_cache_report reasoning_parser tool_call_parser sampling_defaults preferred_sampling_params
allow_auto_truncate stream_interval stream_response_default_include_usage incremental_streaming_output log_level
log_level_http log_requests log_requests_level log_requests_format log_requests_target
uvicorn_access_log_exclude_prefixes show_time_cost enable_metrics tokenizer_metrics_custom_labels_header
tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
bucket_e2e_request_latency decode_log_interval constrained_json_whitespace_pattern
constrained_json_disable_any_whitespace cuda_graph_max_bs_decode cuda_graph_bs_decode disable_prefill_cuda_graph
disable_decode_cuda_graph disable_cuda_graph download_dir gc_threshold sleep_on_idle tokenizer_backend
detokenizer_worker_num model_loader_extra_config model_config_parser enable_fp32_lm_head enable_tf32_matmul
prefill_max_requests disable_priority_preemption default_priority_value abort_on_priority_when_disabled
schedule_low_priority_values_first priority_scheduling_preemption_threshold radix_eviction_policy enable_p2p_check
base_gpu_id gpu_id_step soft_watchdog_timeout custom_sigquit_handler numa_node file_storage_path strip_thinking_cache
tool_server batch_notify_size enable_session_radix_cache crash_dump_folder enable_mfu_metrics
enable_metrics_for_all_schedulers load_snapshot_publish_interval prompt_tokens_buckets generation_tokens_buckets
gc_warning_threshold_secs enable_request_time_stats_logging kv_events_config enable_forward_pass_metrics
forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint
export_metrics_to_file export_metrics_to_file_dir stat_loggers bf16_gemm_backend disable_flashinfer_autotune
cuda_graph_max_bs_prefill cuda_graph_bs_prefill enable_cudagraph_gc enable_layerwise_nvtx_marker enable_nccl_nvls
enable_symm_mem triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem pre_warm_nccl enable_flashinfer_allreduce_fusion
enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
cpu_offload_gb weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
engine_info_bootstrap_port modelexpress_config model_checksum delete_ckpt_after_loading decrypted_config_file
enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
prefill_delayer_max_delay_ms enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks
msprobe_dump_config
hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch lora_eviction_policy max_lora_chunk_size
lora_strict_loading lora_drain_wait_threshold
quantization_param_path modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
modelopt_export_path quantize_and_serve rl_quant_profile fp8_gemm_runner_backend fp4_gemm_runner_backend
constrained_json_max_whitespace_cnt cuda_graph_max_seq_len_prefill default_chat_template_kwargs
disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill enable_http_worker_reuseport
enable_lean_attention enable_response_store flashinfer_autotune_skip_ops gated_launch_port hicache_host_memory_fraction
http2_initial_connection_window_size http2_max_concurrent_streams load_publish_endpoint otlp_service_name
prefill_decode_interval prefill_decode_interval_min_bs radix_eviction_policy_config retraction_policy return_input_ids
return_output_ids trust_request_chat_template weight_cache_mode weight_cache_socket weight_cache_timeout
""".split()
"""Flags that mean what they mean on a plain server."""

OTHER_MODELS_FLAGS = """
is_embedding moe_dp_size
asr_max_buffer_seconds asr_max_concurrent_sessions
mm_attention_backend dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend mamba_backend
flashinfer_mla_disable_ragged enable_fused_moe_sum_all_reduce enable_deepseek_v4_fp4_indexer ep_size
flashinfer_mxfp4_moe_precision deepep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
expert_distribution_recorder_buffer_size deepep_config
elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device
disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enforce_shared_experts_fusion
max_mamba_cache_size mamba_ssm_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
mamba_full_memory_ratio mamba_radix_cache_strategy mamba_track_interval
enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend
linear_attn_prefill_backend enable_linear_replayssm linear_replayssm_cache_len hisparse_config
enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config
limit_mm_data_per_request enable_mm_global_cache disable_fast_image_processor kt_weight_path
kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token dllm_algorithm_config
encoder_only language_only encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
enable_adaptive_dispatch_to_encoder enable_single_batch_overlap enable_precise_embedding_interpolation
disable_chunked_prefix_cache enable_fused_qk_norm_rope
allowed_media_domains c128_page_size cuda_graph_prefill_max_context deepep_v2_mode dsa_triton_union dsv4_attn_backend
dsv4_prefill_backend elastic_ep_initial_size elastic_ep_scale_timeout enable_amd_monokernel
enable_decoder_swa_bounded_replay enable_dsa_cache_layer_split enable_dsa_fused_indexer
enable_encoder_swa_bounded_replay enable_linear_replayssm_spec enable_megamoe_for_layernorm_sp enable_paged_experts
enable_scattered_sconv enable_w4a4_mxfp4_megamoe enable_waterfill ep_join_mode ep_join_rank_offset
expert_balancedness_report_mode flashinfer_a2a_dispatch_type fuseep_mode image_processor_backend language_model_only
linear_attn_verify_backend mamba_max_states_per_path max_ep_size media_url_max_file_size_mb mm_feature_transport
mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb mm_processor_worker_num paged_experts_num_resident
ple_offload_backend ple_offload_dir ple_offload_embedding qsa_indexer_dtype shared_experts_tp_size swa_prefix_tails
trust_mm_content_hashes
""".split()
"""Flags of parts that few targets have: experts, state spaces, other modalities. DSPARK reads none of them."""

REFUSED_FEATURES_FLAGS = """
pp_max_micro_batch_size pp_async_batch_depth load_balance_method enable_prefill_cp cp_strategy
enable_dp_attention_local_control_broadcast enable_dp_lm_head
enable_attn_tp_input_scattered disable_attn_tp_gather hicache_storage_prefetch_policy
hicache_storage_backend_extra_config experts_shared_outer_loras lora_use_virtual_experts
tbo_token_distribution_threshold
lmcache_config_file disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache num_reserved_decode_tokens
disaggregation_decode_extra_slots disaggregation_decode_polling_interval pdmux_config_path sm_group_num
enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_dynamic_chunking
custom_weight_loader offload_num_in_group offload_prefetch_step offload_mode
enable_custom_logit_processor enable_return_hidden_states disable_outlines_disk_cache kv_canary_real_data
kv_canary_sweep_interval enable_torch_compile_debug_mode torch_compile_max_bs
boundary_reduction dcp_comm_backend dcp_replicate_q_proj disaggregation_decode_allocation_policy
disaggregation_decode_host_receive_threshold disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
dllm_fdfo enable_cp_decode_attn_tp enable_dense_mlp_attn_tp enable_linker_mla_dedup enable_pd_role_switch
enable_shared_experts_attn_tp enable_tp_lm_head_all_to_all flexkv_config_file grpc_response_timeout_secs
hicache_host_memory_mode hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
mlx_enable_sampling optimistic_prefill_attempts prefill_kv_cache_dequant_dtype return_aux_hidden_state_layer_ids
return_hidden_states_mode sampling_mask_max_tokens sidecar sidecar_args smg_http_sidecar_port
unified_cache_external_linker_backend unified_cache_external_linker_config watermark_config
""".split()
"""Flags that only adjust something that is refused itself."""

COMPUTED_FIELDS = """
_radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set
_swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture enable_cp_tp_group_sharing grpc_worker_threads
speculative_boundary_reduction uses_mamba_radix_cache watermark_context_window watermark_default_enabled
watermark_enforce_all watermark_key watermark_key_b watermark_max_probability watermark_mixing_probability
""".split()
"""What SGLang decides by itself, without a flag."""


def refusals(args: Any, resolved: Any) -> Iterator[str]:
    """What of the server's flags DSPARK refuses.

    Args:
        args: SGLang's ``ServerArgs``.
        resolved: the same, with what SGLang has decided about them by now.
    """
    for refusal in REFUSED_FLAGS:
        if refusal.refuses(args) or refusal.refuses(resolved):
            value = getattr(args if refusal.refuses(args) else resolved, refusal.name)
            yield f"DSPARK cannot run with {flag_of(refusal.name)}={value}; {refusal.remedy}"


def flag_of(name: str) -> str:
    """The flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")
