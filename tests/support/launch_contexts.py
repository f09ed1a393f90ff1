"""Starts as the checks see them, without SGLang resolving anything."""

from types import SimpleNamespace

import torch

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.launch.checks import all_checks
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch_state import DSparkServer

ARGS = {
    "device": "cuda",
    "nnodes": 1,
    "tp_size": 1,
    "model_path": "target",
    "load_format": "auto",
    "kv_cache_dtype": "auto",
    "page_size": None,
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "cuda_graph_backend_prefill": None,
    "enable_hierarchical_cache": False,
    "enable_int8_mamba_checkpoint": False,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_mamba_cache_stochastic_rounding": False,
    "enable_lora": None,
    "lora_paths": None,
    "lora_backend": "csgmv",
    "speculative_num_draft_tokens": None,
    "speculative_draft_model_path": None,
    "speculative_draft_load_format": None,
    "speculative_draft_window_size": None,
    "speculative_draft_sink_size": None,
}
TARGET = {
    "dtype": torch.bfloat16,
    "head_dim": 128,
    "context_len": 8192,
    "quantization": None,
    "has_attention_sinks": False,
    "is_hybrid_swa": False,
}
HYBRID = {
    "linear_attn_backend": "triton",
    "linear_attn_prefill_backend": None,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 256,
}


def launch_context(*, drafter=None, target=(), options=(), prefill="fa3", decode="fa3", hybrid=(), **args):
    """A start with these arguments of SGLang, where they are not the defaults."""
    context = LaunchContext(
        SimpleNamespace(**ARGS | args), DSparkServer(DSparkConfig(**dict(options)), drafter, dummy_draft=False)
    )
    text = SimpleNamespace(rope_parameters={}, original_max_position_embeddings=4096)
    known = {"hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"]), "hf_text_config": text}
    vars(context)["target"] = SimpleNamespace(**TARGET | known | dict(target))
    vars(context)["resolved"] = SimpleNamespace(
        prefill_attention_backend=prefill, decode_attention_backend=decode, **HYBRID | dict(hybrid)
    )
    return context


def found_by(name, context):
    """Return the message of the check of this name."""
    [check] = [check for check in all_checks() if check.name == name]
    return check.message(context)
