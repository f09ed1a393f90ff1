"""Which request fields and HTTP routes of SGLang DSPARK serves: the lists for the refusals and docs/sglang_flags.md.

Every one of SGLang's is named here, so that a new one is noticed.
"""

from __future__ import annotations

REFUSED_FIELDS = (
    "return_hidden_states",
    "custom_logit_processor",
    "input_embeds",
    "positional_embed_overrides",
    "return_routed_experts",
    "return_indexer_topk",
    "multi_item_delimiter_indices",
    "watermark",
    "return_sampling_mask",
    "max_thinking_tokens",
    "token_indices_to_pool",
    "sampling_logprobs_mode",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
)
"""Fields of a request that DSPARK refuses when they are set."""

SERVED_FIELDS = """
lora_path lora_id rid text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob
return_text_in_logprobs stream log_metrics session_params routing_key conversation_id background require_reasoning
priority extra_key no_logs custom_labels return_prompt_token_ids external_trace_header received_time http_worker_ipc
session_id return_bytes return_entropy cache_salt kv_hints return_flat_raw_top_logprobs_b64
""".split()
"""Fields that mean what they mean on a plain server."""

OTHER_MODELS_FIELDS = """
image_data video_data audio_data mm_hashes use_audio_in_video modalities max_dynamic_patch min_dynamic_patch
image_max_dynamic_patch video_max_dynamic_patch images_config need_wait_for_mm_inputs num_items_assigned
encoder_urls routed_experts_start_len mm_content_hashes mm_processor_kwargs video_config
""".split()
"""Of images and other media, and of models that are refused."""

REFUSED_FEATURES_FIELDS = """
bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank disagg_prefill_dp_rank
data_parallel_rank
""".split()
"""Fields that belong to features that the start refuses."""

SAMPLING_PARAMETERS = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed
ebnf_full_assistant stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized
""".split()
"""Sampling parameters that are served; the last five are SGLang's own."""

REFUSED_PARAMETERS = ("watermark", "beam_width")
"""Sampling parameters that are refused where they ask for something."""

# Most would change or drop the target, and leave the drafter and the draft K/V of cached prefixes behind. Two would
# give the server another part to play. The last one sets what other speculative algorithms read.
REFUSED_ROUTES = (
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/pd_role_switch",
    "/scale_elastic_ep",
    "/set_internal_state",
)
REFUSED_CHANGES = ("/hicache/storage-backend",)
"""Routes that are only read: other methods than GET would move K/V beyond the host's memory, and the draft K/V not."""

SERVED_ROUTES = """
/ /abort_request /add_external_corpus /classify /clear_hicache_storage_backend /close_session /configure_logging
/continue_generation /destroy_weights_update_group /detokenize /dump_expert_distribution_record /dumper/{method}
/encode /flush_cache /freeze_gc /generate /get_load /get_model_info /get_remote_instance_transfer_engine_info
/get_server_info /get_weight_version /get_weights_by_name /health /health_generate /hicache/storage-backend/clear
/init_weights_send_group_for_remote_instance /init_weights_update_group /invocations /list_external_corpora
/load_lora_adapter /load_lora_adapter_from_tensors /model_info /open_session /parse_function_call /pause_generation
/ping /remote_instance_transfer_engine_info /remove_external_corpus /send_weights_to_remote_instance
/separate_reasoning /server_info /set_trace_level /slow_down /start_expert_distribution_record /start_profile
/stop_expert_distribution_record /stop_profile /tokenize /unload_lora_adapter /update_weight_version
/v1/audio/transcriptions /v1/chat/completions /v1/classify /v1/completions /v1/detokenize /v1/embeddings /v1/messages
/v1/messages/count_tokens /v1/models /v1/models/{model:path} /v1/realtime /v1/rerank /v1/responses
/v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/score /v1/tokenize /weight_version /v1/loads
/vertex_generate /api/generate /api/chat /api/tags /api/show
/get_hicache_l3_cache_layout /ready /v1/decisions /v1/systemone /is_scaling_elastic_ep
""".split()


def is_refused(path: str, method: str) -> bool:
    """Whether a request answers HTTP 400, whatever it asks for.

    Args:
        path: without the server's root path.
        method: of HTTP, in capitals.
    """
    return path in REFUSED_ROUTES or (path in REFUSED_CHANGES and method != "GET")
