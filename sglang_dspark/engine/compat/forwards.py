"""Forwards of the target: how one is made from a batch, and what a captured one has to say of itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

_MODE_IS_ARGUMENT = "capture_hidden_mode" in inspect.signature(ForwardBatch.init_new).parameters
_COUNT = "num_token_non_padded_cpu"
_COUNT_NAME = _COUNT if _COUNT in {field.name for field in dataclasses.fields(ForwardBatch)} else f"global_{_COUNT}"


def capturing_forward(batch: Any, runner: Any) -> Any:
    """The forward of a prefill that returns the tapped hidden states of all its tokens."""
    if not _MODE_IS_ARGUMENT:
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        return ForwardBatch.init_new(batch, runner)
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )


@contextmanager
def logits_as_they_come() -> Iterator[None]:
    """Inside, forwards return logits in the dtype of the target's LM head.

    SGLang copies them to float32 otherwise, which changes no number and reads and writes all of them. It goes on doing
    so where it caps logits behind that: capped ones would be rounded, and be equal where they were not.
    """
    copying = LogitsProcessor._copy_logits_to_buffer

    def leaving(processor: Any, logits: torch.Tensor, metadata: Any, **options: Any) -> torch.Tensor:
        if processor.final_logit_softcapping:
            return cast("torch.Tensor", copying(processor, logits, metadata, **options))
        return logits[:, : processor.vocab_size]

    LogitsProcessor._copy_logits_to_buffer = leaving
    try:
        yield
    finally:
        LogitsProcessor._copy_logits_to_buffer = copying


def token_count(num_tokens: int) -> dict[str, int]:
    """Fields of a ``ForwardBatch`` made by hand that say on the host how many of its tokens are none of padding."""
    return {_COUNT_NAME: num_tokens}


def has_mrope(runner: Any) -> bool:
    """Whether positions of the target's tokens have three coordinates, as of what is seen."""
    owner = runner.model_config if hasattr(runner.model_config, "model_is_mrope") else runner
    return bool(owner.model_is_mrope)


def use_attention(runner: Any, backend: Any) -> None:
    """Have the target's forwards compute attention with ``backend``."""
    runner.attn_backend = backend
    if hasattr(runner, "kv_index_translator"):
        runner.kv_index_translator.bind_and_verify_backends([backend])
