"""Names the flags of SGLang that DSPARK refuses, with the values that it serves.

A flag that is not named here means what it means on a plain server, or other modules of this folder decide about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_dspark.engine.support import PAGE_SIZES


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
        """Return whether ``args`` have another value."""
        value = getattr(args, self.name)
        return value not in self.allowed and not (self.follows and value == getattr(args, self.follows))


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
    Refusal("debug_cuda_graph", (False,), "drop the flag; --disable-cuda-graph runs steps eagerly"),
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
