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
from transformers import GenerationConfig

from sglang_dspark.errors import ConfigError

# Relative error of logits recomputed from the last hidden state: a forgotten scale or soft cap is far off.
_LOGIT_TOLERANCE = 0.05


@dataclass(frozen=True)
class TargetStates:
    """The rows that the drafter learns from, one per token that went through the target."""

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
        # Texts are drawn from the bare distribution: penalties and cuts that the checkpoint suggests would change it.
        eos = sorted(self.stop_ids)
        model.generation_config = GenerationConfig(eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)
        self._check_logits()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, tap_ids: Sequence[int], *, dtype: torch.dtype, device: str = "cpu"
    ) -> Target:
        """Load a local checkpoint directory, or a model of the Hugging Face hub by its name."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return cls(model.to(device), tap_ids)

    @property
    def device(self) -> torch.device:
        return self.lm_head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head_weight.dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """Return the weight of the LM head, ``[V, d]``."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def embed_weight(self) -> Tensor:
        """Return the weight of the embedding, ``[V, d]``."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def embed_scale(self) -> float:
        """Return the factor that the model puts on what it reads of its embedding."""
        return float(getattr(self.model.get_input_embeddings(), "embed_scale", 1.0))

    @torch.no_grad()
    def final_norm_weight(self) -> Tensor:
        """Return the factors ``[d]`` of the final norm; ones where it is not called ``norm``.

        Some families store them less one, so they are read off what the norm does to a vector of mean 0 and variance 1.
        """
        norm: Any = getattr(self.backbone, "norm", None)
        if getattr(norm, "weight", None) is None:
            return torch.ones(self.hidden_size)
        signs = torch.ones(self.hidden_size, dtype=self.dtype, device=self.device)
        signs[1::2] = -1.0
        return norm(signs) * signs

    @torch.no_grad()
    def forward(self, ids: Tensor) -> TargetStates:
        """Run the headless target over token ids ``[bs, S]``, padded on the right, and return its states."""
        taps: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for tap_id in self.tap_ids:
                module = self.model.get_input_embeddings() if tap_id == -1 else self._layers[tap_id]
                hooks.callback(module.register_forward_hook(_store_output(taps, tap_id)).remove)
            # Attention is causal: padding on the right reaches no token of a text, so no mask is needed.
            output = self.backbone(input_ids=ids, use_cache=False)
        features = torch.cat([taps[tap_id] for tap_id in self.tap_ids], dim=-1)
        return TargetStates(features, output.last_hidden_state)

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Return float32 logits ``[..., V]`` of last hidden states ``[..., d]``."""
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
    """Return the token ids that end an answer, of a checkpoint directory or a model of the Hugging Face hub."""
    from transformers import AutoConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a checkpoint without generation_config.json
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    return stop_ids(generation.eos_token_id)


def stop_ids(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Return the token ids that end an answer, from the ``eos_token_id`` of a generation configuration."""
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
