"""Decides whether the requests of a step may verify different numbers of drafts on SGLang's own worker."""

import json
from collections.abc import Iterator

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view, use_mla_backend
from sglang.srt.configs.hybrid_arch import hybrid_kda_config, mambaish_config
from sglang.srt.configs.model_config import is_minimax_sparse
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_platform
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dspark.engine.sglang_types import ModelConfig, ServerArgs

RAGGED_BACKENDS = ("fa3", "fa4", "trtllm_mla", "dsv4")
"""Attention backends that verify ragged rows, of all targets that they serve."""

KV_BACKENDS = {
    *("fa3", "fa4", "flashinfer", "trtllm_mha", "trtllm_mla", "triton"),
    *("flashmla", "cutedsl_mla", "dsa", "torch_native"),
}
"""Attention backends that keep K/V of each token, and nothing else."""


def why_one_length(args: ServerArgs) -> str | None:
    """Return why all requests of a step verify as many drafts, by resolved arguments; None if each may have its own."""
    return next(_reasons(resolved_view(args), model_config_of(args)), None)


def has_narrow_rows(args: ServerArgs, target: ModelConfig) -> bool:
    """Return whether fewer rows of each request may be verified than a block has.

    Layers that keep a state of each draft (recurrent ones, DeepSeek V4) address it by the rows of the verification, and
    SGLang commits it by those of the block: with fewer, as that of another request. So attention has to keep K/V alone.
    """
    backends = attention_backends_of(resolved_view(args))
    return mambaish_config(target) is None and set(backends) <= KV_BACKENDS and not is_minimax_sparse(target.hf_config)


def _reasons(args: ServerArgs, target: ModelConfig) -> Iterator[str]:
    prefill, decode = attention_backends_of(args)
    backend = decode if args.speculative_attention_mode == "decode" else prefill
    if not _is_ragged(backend, args):
        yield f"the attention backend {backend} takes the same number of rows of every request"
    if args.cuda_graph_config.decode.backend == Backend.DISABLED:
        yield "without CUDA graphs of decoding, the host would wait for the numbers in every step"
    if mambaish_config(target) is not None and hybrid_kda_config(target) is None:
        yield "its recurrent layers take the same number of rows of every request"
    if is_minimax_sparse(target.hf_config):
        yield "its sparse attention takes the same number of rows of every request"
    if getattr(target.hf_text_config, "engram_layer_ids", ()):
        yield "its n-gram embeddings take the same number of rows of every request"
    if target.model_is_mrope:
        yield "its positions have three coordinates"
    if args.enable_lora:
        yield "adapters take the same number of rows of every request"
    if not _has_head(args):
        yield "the drafter has no confidence head"


def _is_ragged(backend: str | None, args: ServerArgs) -> bool:
    """Return whether an attention backend verifies ragged rows of this target on this GPU."""
    if backend == "trtllm_mha":
        return bool(get_platform().is_sm100)  # its kernels for other GPUs do not
    return backend in RAGGED_BACKENDS or (backend == "flashinfer" and use_mla_backend(args))


def _has_head(args: ServerArgs) -> bool:
    """Return whether the drafter's configuration has a confidence head; one that says nothing has it, as in SGLang."""
    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    return bool(getattr(config, "enable_confidence_head", True))
