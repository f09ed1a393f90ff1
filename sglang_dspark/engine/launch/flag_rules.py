"""Names the flags of SGLang that DSPARK refuses, with the values that it serves.

A flag that is not named here means what it means on a plain server, or other modules of this folder decide about it.
"""

from collections.abc import Iterator

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.launch.flag_rule import FlagRule, flag_of
from sglang_dspark.engine.support import PAGE_SIZES

HTTP = "drop the flag: requests are checked on their way through HTTP"
PARTS_OF_STATES = (
    "drop the flag: each rank would hold the hidden states of some tokens only, and a drafter reads all of them"
)
EXACT = "drop the flag: DSPARK always keeps the target's distribution"
ADAPTS = "drop the flag: the policy auto of DSPARK adapts by itself"
OTHER_ALGORITHM = "drop the flag: it belongs to other speculative algorithms"
UNREAD = ("speculative_ngram_", "speculative_domino_", "speculative_dsa_", "uno_", "decoupled_spec_", "spec_trace_")
"""What the names of flags begin with that SGLang reads for other speculative algorithms alone."""

_OFF = (
    "enable_dp_attention enable_mixed_chunk enable_lmcache enable_flexkv enable_unified_cache_external_linker "
    "enable_kv_cache_sharding enable_two_batch_overlap enable_pdmux enable_memory_saver "
    "enable_unified_memory enable_page_major_kv_layout enable_hisparse prefill_only_disable_kv_cache "
    "enable_return_routed_experts enable_return_indexer_topk enable_return_aux_hidden_states enable_watermark "
    "speculative_use_block_verification"
).split()
"""Switches that are served off."""

FLAG_RULES: tuple[FlagRule, ...] = (
    *(FlagRule(name, (False,)) for name in _OFF),
    *(FlagRule(name, (1,), "pass 1") for name in ("attn_dp_size", "dwdp_size", "attn_cp_size", "dcp_size")),
    FlagRule("pp_size", (1,), "pass --pp-size 1"),
    FlagRule("disaggregation_mode", ("null",), "drop the flag: draft K/V is not handed on between servers"),
    FlagRule("page_size", (*PAGE_SIZES, None), "pass 1, 16, 32 or 64"),
    FlagRule("kv_cache_dtype", ("auto", "bfloat16", "bf16", "fp8_e4m3"), "pass auto, bfloat16 or fp8_e4m3"),
    FlagRule("moe_a2a_backend", ("none",), PARTS_OF_STATES),
    FlagRule("moe_dense_tp_size", (None,), PARTS_OF_STATES),
    FlagRule("enable_layernorm_sp", (False,), PARTS_OF_STATES),
    FlagRule("grpc_mode", (False,), HTTP),
    FlagRule("smg_grpc_mode", (False,), HTTP),
    FlagRule("grpc_port", (None,), f"{HTTP}; SGLANG_GRPC_PORT sets it as well"),
    FlagRule(
        "grammar_backend",
        ("xgrammar", "llguidance", "none"),
        "pass xgrammar, llguidance or none: drafts are tried out on a grammar that can go back",
    ),
    FlagRule(
        "enable_deterministic_inference",
        (False,),
        "drop the flag; requests with a seed are reproducible under DSPARK without it",
    ),
    FlagRule("dllm_algorithm", (None,)),
    FlagRule(
        "enable_quant_communications",
        (False, None),
        "drop the flag: it makes sums of several ranks coarser in verification, and not in the steps of a plain server",
    ),
    FlagRule("enable_torch_compile", (False,), "drop the flag: steps of DSPARK are not compiled"),
    FlagRule("enable_nvidia_megakernel", (False,), "drop the flag: verification has kernels of its own"),
    FlagRule(
        "startup_weight_load_mode",
        ("serial",),
        "pass serial: the drafter reads the target's weights before graphs are captured",
    ),
    FlagRule("debug_cuda_graph", (False,), "drop the flag; --disable-cuda-graph runs steps eagerly"),
    FlagRule("cuda_graph_backend_decode", (None, "full", "disabled"), "pass full or disabled"),
    FlagRule("enable_mis", (False,), "drop the flag and score items with a server without DSPARK"),
    FlagRule("kv_canary", ("none",), "drop the flag: it does not know the rows that DSPARK verifies"),
    FlagRule("rl_on_policy_target", (None,), "drop the flag: it asks for deterministic inference"),
    FlagRule(
        "checkpoint_engine_wait_weights_before_ready",
        (False,),
        "drop the flag: the target's weights cannot be updated under DSPARK",
    ),
    FlagRule("decrypted_draft_config_file", (None,), "drop the flag: DSPARK reads the drafter's own config.json"),
    FlagRule("radix_cache_backend", (None,), "drop the flag: draft K/V exists only for SGLang's own pool of slots"),
    FlagRule("offload_group_size", (-1,), "drop the flag; --cpu-offload-gb is served"),
    FlagRule("use_ray", (False,), "drop the flag: schedulers have to be processes that load the plugin"),
    FlagRule("speculative_num_steps", (None, 1), "drop the flag; --speculative-dspark-block-size shortens the block"),
    FlagRule("speculative_eagle_topk", (None, 1), OTHER_ALGORITHM),
    FlagRule("speculative_dflash_block_size", (None,), "pass --speculative-dspark-block-size"),
    FlagRule("speculative_accept_threshold_single", (1.0,), EXACT),
    FlagRule("speculative_accept_threshold_acc", (1.0,), EXACT),
    FlagRule("speculative_use_rejection_sampling", (False,), "drop the flag: DSPARK always samples by rejection"),
    FlagRule("speculative_token_map", (None,), "drop the flag: a drafter of DSPARK brings its draft_vocabulary.json"),
    FlagRule("speculative_attention_mode", ("prefill",), OTHER_ALGORITHM),
    FlagRule(
        "speculative_draft_attention_backend", (None,), "drop the flag: the drafter has attention kernels of its own"
    ),
    FlagRule(
        "speculative_draft_kv_cache_dtype", (None,), "drop the flag: the drafter's K/V has the dtype of the weights"
    ),
    FlagRule(
        "speculative_dspark_align_verify_tokens_to_graph_tier",
        (False,),
        "drop the flag: it belongs to SGLang's own worker",
    ),
    FlagRule("speculative_moe_runner_backend", (None, "auto"), OTHER_ALGORITHM, follows="moe_runner_backend"),
    FlagRule("speculative_moe_a2a_backend", (None, "none"), OTHER_ALGORITHM),
    FlagRule("enable_multi_layer_eagle", (False,), OTHER_ALGORITHM),
    FlagRule("speculative_enable_w4a4_mxfp4_megamoe", (None,), OTHER_ALGORITHM),
    FlagRule("speculative_adaptive", (False,), ADAPTS),
    FlagRule("speculative_adaptive_config", (None,), ADAPTS),
    FlagRule("decoupled_spec_role", ("null",), OTHER_ALGORITHM),
)


def all_rules() -> tuple[FlagRule, ...]:
    """Return the rules of the core and those of all features."""
    return (*FLAG_RULES, *(rule for feature in all_features() for rule in feature.flag_rules))


def unread(args: ServerArgs) -> list[str]:
    """Return the flags that have no effect under DSPARK, and that the operator has set all the same."""
    ruled = {rule.name for rule in all_rules()}
    fields = (field for field in record_fields(ServerArgs) if field.name.startswith(UNREAD))
    set_by_hand = (field.name for field in fields if getattr(args, field.name) != field.default)
    return [flag_of(name) for name in set_by_hand if name not in ruled]


def refusals(args: ServerArgs, resolved: ServerArgs) -> Iterator[str]:
    """Yield a message for every flag with a value that DSPARK does not serve, given or ``resolved`` by SGLang."""
    for rule in all_rules():
        for found in (args, resolved):
            if rule.refuses(found):
                yield f"DSPARK cannot run with {flag_of(rule.name)}={getattr(found, rule.name)}; {rule.remedy}"
                break
