"""Keys that trainers leave over from the configuration of the target.

Trainers write the config.json of a drafter over a copy of its target's, and build the drafter from the Qwen3 classes of
transformers, which read few of these keys: the others stand in the file and had no part in the training. They are about
experts, recurrent states, gates, latent K/V, pictures, norms and scales that the drafter's layers do not have.
"""

from collections.abc import Collection

from sglang_dspark.draft.formats.content import Content

REASON = "it is a copy of the target's, and no trainer reads it"

PART_OF_HEAD = ("partial_rotary_factor", "rotary_dim", "rotary_pct")
"""Keys beside the layers or among those of RoPE, also in files that say nothing about parts of a head otherwise.

Trainers rotate whole heads; a part that is meant has ``rotary_pairs`` beside it."""

ROPE = (
    "mrope_section mrope_interleaved llama_4_scaling_beta apply_yarn_scaling finetuned long_factor short_factor "
    "long_mscale short_mscale"
).split()
"""Keys among those of RoPE. There, a key that only another ``rope_type`` reads is left over as well."""

LAYERS = (
    # experts
    "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts num_experts_per_tok "
    "experts_per_token top_k_experts enable_moe_block moe_intermediate_size expert_intermediate_size "
    "shared_expert_intermediate_size intermediate_size_mlp moe_layers mlp_layer_types moe_layer_freq "
    "interleave_moe_layer_step decoder_sparse_step mlp_only_layers first_k_dense_replace norm_topk_prob n_group "
    "topk_group topk_method scoring_func routed_scaling_factor output_router_logits router_aux_loss_coef "
    "router_jitter_noise aux_loss_alpha seq_aux swiglu_alpha swiglu_limit "
    # recurrent states
    "full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_attn_config mamba_ssm_dtype mamba_num_heads mamba_head_dim mamba_d_conv "
    "mamba_d_state mamba_expand ssm_state_size conv_kernel conv_bias conv_L_cache full_attn_idxs layers_block_type "
    "hybrid_override_pattern "
    # gates
    "attn_output_gate output_gate_type gating "
    # latent K/V
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim index_topk index_head_dim "
    "index_n_heads indexer_types "
    # pairs of RoPE
    "rope_interleave indexer_rope_interleave "
    # layers that do not rotate, or otherwise
    "no_rope_layers no_rope_layer_interval initial_context_length rope_local_base_freq local_rope_theta "
    "global_rope_theta swa_rope_theta "
    # factors of scores, embeddings and logits
    "query_pre_attn_scalar attn_temperature_tuning floor_scale attn_scale attention_multiplier residual_multiplier "
    "embedding_multiplier logits_scaling logit_scale scale_emb scale_depth dim_model_base "
    # windows
    "sliding_window_pattern _sliding_window_pattern attention_chunk_size hybrid_layer_pattern num_kv_shared_layers "
    # norms and projections
    "use_qk_norm qk_norm attention_k_eq_v global_head_dim num_global_key_value_heads hidden_size_per_layer_input "
    "use_double_wide_mlp hidden_activation mlp_bias "
    # multi-token prediction
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers "
    # pictures, and what is around the text
    "text_config vision_config audio_config image_token_id video_token_id audio_token_id image_token_index "
    "video_token_index vision_start_token_id vision_end_token_id boi_token_id eoi_token_id boa_token_id "
    "eoa_token_id boi_token_index eoi_token_index eoa_token_index mm_tokens_per_image vision_soft_tokens_per_image "
    "spatial_merge_size language_model_only use_mrope use_bidirectional_attention vocab_size_per_layer_input "
).split()
"""Keys beside the layers."""


def pass_over(content: Content, read: Collection[str]) -> None:
    """Note the keys beside the layers that are left over from the target, but for those that are ``read``."""
    for key in LAYERS:
        if key not in read:
            for name in dict.fromkeys((content.section + key, key)):
                content.ignore(name, REASON)
