"""Names the flags of SGLang that DSPARK adjusts or refuses, and sets those that it decides itself.

A flag is refused if texts would be wrong with it, or if the server could not do what it asks for. A flag that changes
speed only is adjusted. One that is not named here means what it means on a plain server, or ``checks.py`` and
``start.py`` decide about it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import flag_name
from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.engine.feature import FlagRule, LaunchContext, all_features, off_gpu
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM

logger = logging.getLogger(__name__)

OTHER_ALGORITHM = "it belongs to other speculative algorithms"
OWN_GRAPHS = "DSPARK captures CUDA graphs of its own"
PARTS_OF_STATES = "each rank would hold the hidden states of some tokens only, and a drafter reads all of them"
OTHER_PREFIXES = (
    "speculative_ngram_",
    "speculative_domino_",
    "speculative_dsa_",
    "uno_",
    "decoupled_spec_",
    "spec_trace_",
)
"""What the names of flags begin with that SGLang reads only for other speculative algorithms."""

PREFILL_BACKENDS: Mapping[str | None, tuple[str, ...]] = {
    "cpu": ("torch_native",),
    "cuda": ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha"),
}
"""Attention of prompts, by device. Verification has kernels of its own, which read the K/V pools of all of these."""

_DEFAULTS = {field.name: field.default for field in record_fields(Record)}

# By reason: flags whose default is served, and takes the place of all other values.
_ADJUSTED = {
    OTHER_ALGORITHM: (
        "speculative_attention_mode speculative_moe_runner_backend speculative_moe_a2a_backend "
        "speculative_enable_w4a4_mxfp4_megamoe speculative_use_block_verification enable_multi_layer_eagle "
        "speculative_dspark_align_verify_tokens_to_graph_tier"
    ),
    "DSPARK always keeps the target's distribution, and samples by rejection": (
        "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling"
    ),
    "the policy auto of DSPARK adapts by itself": "speculative_adaptive speculative_adaptive_config",
    "the drafter has attention kernels of its own": "speculative_draft_attention_backend",
    "the drafter's K/V has the dtype of the weights": "speculative_draft_kv_cache_dtype",
    f"{flag_name('draft_vocabulary')} lists what a drafter of DSPARK proposes": "speculative_token_map",
    "DSPARK reads the drafter's own config.json": "decrypted_draft_config_file",
    "verification has kernels of its own": "decode_attention_backend enable_nvidia_megakernel",
    "DSPARK does not compile its steps with torch.compile": "enable_torch_compile",
    OWN_GRAPHS: "debug_cuda_graph enable_profile_cuda_graph",
    "DSPARK returns to SGLang's scheduler after every step": "num_continuous_decode_steps",
    "DSPARK runs one batch at a time": "enable_two_batch_overlap enable_pdmux",
    "DSPARK keeps draft K/V only for SGLang's own K/V pool and prefix cache": (
        "enable_lmcache enable_flexkv enable_unified_cache_external_linker enable_kv_cache_sharding "
        "enable_unified_memory enable_page_major_kv_layout radix_cache_backend"
    ),
    "it does not know which rows DSPARK verifies": "kv_canary",
    PARTS_OF_STATES: "moe_a2a_backend moe_dense_tp_size enable_layernorm_sp enable_waterfill",
    "it would round sums over ranks in a verification, and does not round them in a plain server's decode steps": (
        "enable_quant_communications"
    ),
    "the drafter reads the target's weights before graphs are captured": "startup_weight_load_mode",
}

# By remedy: flags of which only the default is served.
_REFUSED = {
    "drop the flag": (
        "prefill_only_disable_kv_cache enable_return_indexer_topk enable_return_aux_hidden_states enable_watermark "
        "dllm_algorithm"
    ),
    "pass 1": "dwdp_size attn_cp_size dcp_size pp_size",
    # SGLang makes it of --enable-dp-attention.
    "drop it or --enable-dp-attention: SGLang's ranks tell each other their numbers of rows before DSPARK has chosen "
    "them": "attn_dp_size",
    "drop the flag: DSPARK does not transfer draft K/V to another server": "disaggregation_mode",
    "drop the flag: DSPARK checks requests in SGLang's HTTP server": "grpc_mode smg_grpc_mode",
    "drop the flag, and unset SGLANG_GRPC_PORT: DSPARK checks requests in SGLang's HTTP server": "grpc_port",
    "drop the flag: it rounds as one trainer does, and DSPARK's attention was not compared with that": (
        "rl_on_policy_target"
    ),
    "drop the flag and score items with a server without DSPARK": "enable_mis",
    "drop the flag; --cpu-offload-gb is served": "offload_group_size",
    "drop the flag: SGLang's Ray actors load no plugins; to use Ray, start sglang.Engine in an actor of your own": (
        "use_ray"
    ),
    "drop the flag: DSPARK runs drafter and target in one server": "decoupled_spec_role",
    PARTS_OF_STATES: "moe_a2a_backend",  # as SGLang itself may choose
}


def _prefill_attention(name: str) -> FlagRule:
    return FlagRule(
        name,
        (None,),
        "DSPARK's verification does not read the K/V of this backend",
        adjusts=True,
        applies=lambda context: getattr(context.args, name) not in PREFILL_BACKENDS.get(context.args.device, ()),
    )


FLAG_RULES: tuple[FlagRule, ...] = (
    *(FlagRule(name, (_DEFAULTS[name],), why) for why, names in _REFUSED.items() for name in names.split()),
    *(FlagRule(name, (_DEFAULTS[name],), why, True) for why, names in _ADJUSTED.items() for name in names.split()),
    *(
        FlagRule(name, (default,), OTHER_ALGORITHM, adjusts=True)
        for name, default in _DEFAULTS.items()
        if name.startswith(OTHER_PREFIXES) and name != "decoupled_spec_role"
    ),
    *map(_prefill_attention, ("attention_backend", "prefill_attention_backend")),
    FlagRule(
        "page_size",
        (None, 1),
        "SGLang's allocator of pages needs a GPU",
        adjusts=True,
        applies=off_gpu,
    ),
    FlagRule(
        "kv_cache_dtype",
        ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2"),
        "pass auto, bfloat16, fp8_e4m3 or fp8_e5m2",
    ),
    FlagRule(
        "grammar_backend",
        ("xgrammar", "llguidance", "none", None),
        "pass xgrammar, llguidance or none: DSPARK needs grammars that it can roll back after rejected drafts",
    ),
    FlagRule(
        "moe_runner_backend",
        ("auto",),
        PARTS_OF_STATES,
        adjusts=True,
        applies=lambda context: context.args.moe_runner_backend in ("megamoe", "flashinfer_megamoe"),
    ),
    FlagRule("speculative_eagle_topk", (None, 1), "DSPARK drafts a chain, not a tree", adjusts=True),
    FlagRule(
        "sampling_backend",
        (None, "pytorch"),
        "DSPARK samples from the distribution of the pytorch backend",
        adjusts=True,
    ),
    FlagRule("cuda_graph_backend_decode", ("full", "disabled", None), OWN_GRAPHS, adjusts=True),
    FlagRule(
        "cuda_graph_backend_prefill",
        ("breakable", "disabled", None),
        "only breakable graphs return the hidden states that a drafter reads",
        adjusts=True,
    ),
)


def all_rules() -> tuple[FlagRule, ...]:
    """Return the rules of the core and those of all features."""
    return (*FLAG_RULES, *(rule for feature in all_features() for rule in feature.flag_rules))


def broken_rules(context: LaunchContext, *, adjusts: bool) -> Iterator[FlagRule]:
    """Yield the rules of a kind that hold on a server and whose flags have other values than those that are served."""
    for rule in all_rules():
        if rule.adjusts is adjusts and not rule.serves(context.args) and rule.applies(context):
            yield rule


# Requests at a time on a small GPU, where decode graphs are fewer: the default of SGLang's own speculative algorithms.
MIN_REQUESTS = 48
# Tokens of the largest step, of 256 requests with blocks of 7; what start-up holds grows with them.
MAX_STEP_TOKENS = 2048
# First tokens that a windowed drafter sees: attention rests on them (StreamingLLM, Xiao et al. 2024, has four).
DRAFT_SINKS = 4


CHOOSING_STEPS = ("handle_model_specific_adjustments", "handle_attention_backend_compatibility")
"""Steps of SGLang's resolution that choose attention, pages and kernels for a target and a GPU."""


def prepare_arguments(args: ServerArgs) -> None:
    """Decide what SGLang would decide otherwise when it resolves ``args``, if the operator has not."""
    # Whatever SGLang does with the path of a drafter begins with transformers, which does not know every format: no
    # process of SGLang knows it.
    args.speculative_draft_model_path = None
    # SGLang would say that these have no effect; start.complete gives them back.
    args.speculative_draft_window_size = args.speculative_draft_sink_size = None
    if args.speculative_draft_model_quantization is None:
        args.speculative_draft_model_quantization = "unquant"  # SGLang would take the target's for the drafter's
    if (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        # SGLang has kernels for a GPU there, which it would put in the place of PyTorch's on a CPU; start.find_server
        # has read the flag.
        args.enable_deterministic_inference = False
        if not (args.attention_backend or args.prefill_attention_backend):
            args.attention_backend = "torch_native"  # the only one that serves; on a GPU SGLang's choice does
    elif args.enable_deterministic_inference:
        # Prompts have the attention of verification, which SGLang does not capture.
        args.cuda_graph_backend_prefill = "disabled"
        if not (args.attention_backend or args.prefill_attention_backend):
            args.attention_backend = "triton"  # for another one SGLang turns its prefix cache off
    # Verification has kernels of its own: SGLang shall make one backend, that of prompts.
    args.decode_attention_backend = args.prefill_attention_backend


def choose_as_plain(args: ServerArgs, choose: Callable[[ServerArgs], None]) -> None:
    """Have SGLang choose as it does for a plain server, in one of the :data:`CHOOSING_STEPS`.

    For speculation it chooses other attention of prompts on Blackwell, as if they were verified by it.
    """
    if resolving_view(args).speculative_algorithm != ALGORITHM:
        choose(args)
        return
    declare_resolution(args, "dspark", speculative_algorithm=None)
    choose(args)
    declare_resolution(args, "dspark", speculative_algorithm=ALGORITHM)


def draft_window(args: ServerArgs) -> DraftWindow | None:
    """Return the part of a context that the drafter shall see; None for all of it."""
    size, sinks = args.speculative_draft_window_size, args.speculative_draft_sink_size
    return None if size is None else DraftWindow(size, DRAFT_SINKS if sinks is None else sinks)


def size_buffers(args: ServerArgs, window: int) -> None:
    """Fill the fields that size SGLang's buffers and that hold prefills back.

    Args:
        window: the most tokens that a step verifies per request.
    """
    args.speculative_num_draft_tokens = window
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    # SGLang holds prefills of DFLASH servers back until several slots are free; a plain server lets them in at once.
    if args.min_free_slots_delay is None:
        args.min_free_slots_delay = 1


def limit_requests(args: ServerArgs, window: int) -> None:
    """Admit on a GPU as many requests at a time as decode graphs are captured for, if the operator sets no limit.

    Start-up holds memory for all that may run, gigabytes for the thousands that SGLang would admit. So there are fewer
    if blocks are long, or if SGLang captures graphs for more, as it does on four GPUs.
    """
    if args.max_running_requests is None and args.device == "cuda":
        of_graphs = resolving_view(args).cuda_graph_config.decode.max_bs
        limit_to(args, max(MIN_REQUESTS, min(of_graphs, MAX_STEP_TOKENS // window)))


def limit_to(args: ServerArgs, requests: int) -> None:
    """Limit the requests at a time, and say so."""
    declare_resolution(args, "dspark", max_running_requests=requests)
    logger.info("DSPARK: limiting concurrent requests to %d; override with --max-running-requests", requests)
