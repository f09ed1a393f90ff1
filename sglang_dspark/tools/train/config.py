"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from sglang_dspark.draft.config import MARKOV_HEAD_TYPES, DraftConfig, MarkovHeadType
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.train.loss import LossWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Shape of the drafter and how to train it; the defaults of the optimizer are DeepSpec's.

    Raises:
        ConfigError: a value is out of range.
    """

    # Shape of the drafter; everything else is the target's.
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 7
    num_layers: int = 2
    intermediate_size: int | None = None  # None = the target's
    markov_rank: int = 32
    markov_head_type: MarkovHeadType = "vanilla"
    confidence_head: bool = True
    confidence_head_with_markov: bool = True

    # Data of one step: batch_rows x anchors_per_row blocks.
    batch_rows: int = 16
    anchors_per_row: int = 32
    loss_vocab: int = 0  # most frequent tokens that every step's loss covers; 0 = the whole vocabulary
    loss_vocab_sampled: int = 1024  # tokens drawn per step to stand for the others, see loss_vocabulary.py
    loss: LossWeights = field(default_factory=LossWeights)

    # Optimizer.
    steps: int = 1000
    max_minutes: float | None = None  # of training; the run, and the decay of the learning rate, then end with them
    learning_rate: float = 6e-4
    markov_lr_scale: float = 1.0  # on the learning rate of the Markov embeddings, whose rows are seldom updated
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    seed: int = 42

    # Execution. Parameters and optimizer are float32; matrix products run in compute_dtype.
    device: str = "cpu"
    compute_dtype: str = "float32"
    log_every: int = 10  # steps
    checkpoint_every: int = 200  # steps, with max_minutes a minute instead; held-out acceptance is measured then too
    own_embeddings: bool = False  # copies of the target's embedding and LM head in the checkpoint, as DeepSpec has them

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_layers",
            "batch_rows",
            "anchors_per_row",
            "steps",
            "log_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank={self.markov_rank} must be 0 (no Markov head) or more")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ConfigError(
                f"markov_head_type={self.markov_head_type!r} is not one of {', '.join(MARKOV_HEAD_TYPES)}"
            )
        if self.compute_dtype not in _DTYPES:
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} is not one of {', '.join(_DTYPES)}")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ConfigError(f"max_minutes={self.max_minutes} must be above 0; leave it out to train for all steps")
        if not 0 <= self.warmup_share < 1:
            raise ConfigError(f"warmup_share={self.warmup_share} must be in [0, 1)")

    @property
    def compute_torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.compute_dtype]

    def draft_config(self, target_config: Any) -> DraftConfig:
        """Configuration of the drafter for a target with this transformers text configuration.

        What the target's family does not have (a rotary base, grouped heads, RMS norms) gets Llama's usual value: the
        drafter is a Qwen3-style network whatever the target is.
        """
        with_markov = self.confidence_head and self.confidence_head_with_markov and self.markov_rank > 0
        heads = target_config.num_attention_heads
        return DraftConfig(
            hidden_size=target_config.hidden_size,
            intermediate_size=self.intermediate_size
            or getattr(target_config, "intermediate_size", None)
            or 4 * target_config.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
            vocab_size=target_config.vocab_size,
            rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(target_config),
            max_position_embeddings=target_config.max_position_embeddings,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=target_config.num_hidden_layers,
            markov_rank=self.markov_rank,
            markov_head_type=self.markov_head_type if self.markov_rank else None,
            enable_confidence_head=self.confidence_head,
            confidence_head_with_markov=with_markov,
            num_anchors=self.anchors_per_row,
            origin="TrainConfig",
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        return content | {"loss": vars(self.loss), "target_layer_ids": list(self.target_layer_ids)}


def _rope_theta(target_config: Any) -> float:
    """Base of the target's rotary embedding, of its global layers where layers differ."""
    parameters = getattr(target_config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", 10_000.0))
