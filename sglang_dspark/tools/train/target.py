"""The frozen target model as the trainer sees it: tapped layer outputs, last hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.errors import ConfigError

# Name under which `_grouped_attention` is registered with transformers.
_ATTENTION = "dspark_grouped_sdpa"
# Families whose attention is plain and grouped; others may have soft caps, sinks or windows that it does not know.
_GROUPED_FAMILIES = ("llama", "qwen2", "qwen3")
# Relative error of logits recomputed from the last hidden state: a forgotten scale or soft cap is far off.
_LOGIT_TOLERANCE = 0.05


@dataclass(frozen=True)
class TargetStates:
    """What the drafter learns from, one row per token that went through the target."""

    features: Tensor  # [bs, S, m * d] outputs of the tapped layers, concatenated in ascending layer order
    last_hidden: Tensor  # [bs, S, d] after the target's final norm, ready for its lm_head


class Target:
    """A causal language model from transformers with taps on some of its decoder layers.

    Attributes:
        model: the `AutoModelForCausalLM`, in eval mode, frozen.
        config: its text configuration.
        tap_ids: 0-based ids of the decoder layers whose output is tapped; -1 taps the embedding output.
        stop_ids: token ids that end an answer.

    Raises:
        ConfigError: the taps do not fit, or the model is built in a way that the drafter's losses cannot follow.
    """

    def __init__(self, model: Any, tap_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.backbone = model.base_model
        self.tap_ids = tuple(tap_ids)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = self.config.num_hidden_layers
        check_tap_ids(self.tap_ids, self.num_layers)
        self._layers = _decoder_layers(self.backbone, self.num_layers)
        self.stop_ids = stop_ids(model.generation_config.eos_token_id)
        self._check_logits()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, tap_ids: Sequence[int], *, dtype: torch.dtype, device: str = "cpu"
    ) -> Target:
        """Load a local checkpoint directory, or a model of the Hugging Face hub by its name."""
        from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(_ATTENTION, _grouped_attention)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        plain = AutoConfig.from_pretrained(path).model_type in _GROUPED_FAMILIES
        attention = {"attn_implementation": _ATTENTION} if plain else {}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **attention)
        return cls(model.to(device), tap_ids)

    @property
    def device(self) -> torch.device:
        return self.lm_head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head_weight.dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the LM head, ``[V, d]``."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def embed_weight(self) -> Tensor:
        """Weight of the embedding, ``[V, d]``."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def final_norm_weight(self) -> Tensor:
        """Weight ``[d]`` of the final norm; ones where it is not called ``norm``."""
        norm = getattr(self.backbone, "norm", None)
        weight = getattr(norm, "weight", None)
        return torch.ones(self.hidden_size) if weight is None else weight

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,  # [bs, S] int64
        attention_mask: Tensor | None = None,  # [bs, cached + S], 0 = padding
        position_ids: Tensor | None = None,  # [bs, S]
        cache: Any = None,
    ) -> TargetStates:
        """Run the headless target over `ids` (after what `cache` holds) and return its states."""
        taps: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for tap_id in self.tap_ids:
                module = self.model.get_input_embeddings() if tap_id == -1 else self._layers[tap_id]
                hooks.callback(module.register_forward_hook(_store_output(taps, tap_id)).remove)
            output = self.backbone(
                input_ids=ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        features = torch.cat([taps[tap_id] for tap_id in self.tap_ids], dim=-1)
        return TargetStates(features, output.last_hidden_state)

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Float32 logits ``[..., V]`` of last hidden states ``[..., d]``."""
        return nn.functional.linear(last_hidden, self.lm_head_weight).float()

    @torch.no_grad()
    def _check_logits(self) -> None:
        """The losses recompute the target's logits from its last hidden states: that has to give what it says itself.

        Raises:
            ConfigError: it does not (soft cap, scale or bias on the logits).
        """
        ids = torch.arange(min(8, self.vocab_size), device=self.device)[None]
        said = self.model(ids).logits.float()
        recomputed = self.logits(self.forward(ids).last_hidden)
        if said.shape != recomputed.shape or not torch.allclose(
            said, recomputed, rtol=0, atol=_LOGIT_TOLERANCE * float(said.abs().max())
        ):
            raise ConfigError(
                f"{type(self.model).__name__}: its logits are not its LM head times its last hidden state (a soft cap, "
                "scale or bias); drafters for such targets cannot be trained here, choose a Llama- or Qwen3-like target"
            )


def stop_ids_of(path: str | Path) -> frozenset[int]:
    """Token ids that end an answer, of a checkpoint directory or a model of the Hugging Face hub."""
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a checkpoint without generation_config.json
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    return stop_ids(generation.eos_token_id)


def stop_ids(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids that end an answer, from the ``eos_token_id`` of a generation configuration."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _decoder_layers(backbone: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in backbone.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ConfigError(
        f"{type(backbone).__name__} has no list of {num_layers} decoder layers to tap; choose a Llama- or Qwen3-like "
        "target"
    )


def check_tap_ids(tap_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse taps that a target of so many layers does not have.

    Raises:
        ConfigError: naming them.
    """
    ascending = all(a < b for a, b in pairwise(tap_ids))
    if not tap_ids or not ascending or tap_ids[0] < -1 or tap_ids[-1] > num_layers - 2:
        raise ConfigError(
            f"target_layer_ids={list(tap_ids)} must be strictly increasing in [-1, {num_layers - 2}] for a target of "
            f"{num_layers} layers: the last layer's output exists only after the final norm"
        )


def _store_output(taps: dict[int, Tensor], tap_id: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        taps[tap_id] = output[0] if isinstance(output, tuple) else output

    return hook


def _grouped_attention(
    module: nn.Module,
    query: Tensor,  # [bs, heads, q_len, head_dim]
    key: Tensor,  # [bs, kv_heads, kv_len, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention that reads each key/value head once for all its query heads.

    transformers' own function copies keys and values per query head whenever a mask is given. In batched decoding,
    where q_len is 1, that copy costs more than the attention itself; here the query heads of a group become query rows.
    """
    bs, heads, q_len, head_dim = query.shape
    kv_heads = key.shape[1]
    if q_len == 1:
        grouped = query.reshape(bs, kv_heads, heads // kv_heads, head_dim)
        if key.is_cpu:
            mixed = _attention_by_products(grouped, key, value, attention_mask, scaling)
        else:
            mixed = nn.functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
        return mixed.reshape(bs, 1, heads, head_dim), None
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(heads // kv_heads, dim=1),
        value.repeat_interleave(heads // kv_heads, dim=1),
        attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _attention_by_products(
    query: Tensor,  # [bs, kv_heads, rows, head_dim]
    key: Tensor,  # [bs, kv_heads, kv_len, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [bs, 1, 1, kv_len] bool, True = seen
    scaling: float | None,
) -> Tensor:
    """Attention of few query rows over many keys: on a CPU torch's own function takes twice as long for it."""
    scores = (query * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
