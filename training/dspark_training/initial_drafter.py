"""A drafter to begin a run with, of any format that loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD, load_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.hub import DRAFT_FILES, local_folder

_PROJECTION = "fc.weight"
_W2 = "markov_head.markov_w2.weight"
# Tensors that a message lists.
_NAMED = 4


@dataclass(frozen=True)
class InitialDrafter:
    """Weights to begin with, over the target's whole vocabulary.

    Attributes:
        name: as it was given.
        config: its shape and conventions.
        tensors: by the names of `DraftModel`, float32; without embedding and LM head, which training takes from the
            target.
        token_ids: the tokens that it proposes, ascending; None = all.
    """

    name: str
    config: DraftConfig
    tensors: dict[str, Tensor]
    token_ids: list[int] | None

    @classmethod
    def load(cls, name: str) -> InitialDrafter:
        """Load a folder, or a repository of the Hugging Face hub.

        Raises:
            CheckpointError: there is no such drafter, or it does not load.
        """
        folder = local_folder(name, flag="--init", files=DRAFT_FILES)
        model = load_draft_model(folder, dtype=torch.float32, device="cpu")
        tensors = {part: weight for part, weight in model.state_dict().items() if part not in (EMBEDDING, LM_HEAD)}
        ids = model.token_ids
        if ids is None:
            return cls(name, model.config, tensors, load_token_ids(folder, model.config.vocab_size))
        if _W2 in tensors:
            # Tokens that it has no row for get one of zeros: no bias.
            rows = tensors[_W2]
            tensors[_W2] = rows.new_zeros(model.config.vocab_size, rows.shape[1]).index_copy(0, ids, rows)
        return cls(name, model.config, tensors, ids.tolist())

    def fitting(self, model: DraftModel) -> dict[str, Tensor]:
        """Return the tensors that `model` has in the same shape; the projection only if it reads the same taps."""
        ours: dict[str, Tensor] = model.state_dict()
        if model.config.target_layer_ids != self.config.target_layer_ids:
            del ours[_PROJECTION]
        return {name: w for name, w in self.tensors.items() if name in ours and w.shape == ours[name].shape}

    def give(self, model: DraftModel) -> None:
        """Put the tensors that fit into `model`.

        Raises:
            ConfigError: none does.
        """
        fitting = self.fitting(model)
        if not fitting:
            raise ConfigError(f"--init {self.name}: no tensor has a shape of the drafter to be trained; leave it out")
        model.load_state_dict(fitting, strict=False)

    def account(self, model: DraftModel) -> str:
        """Say how many tensors `model` has of this drafter, and which were drawn."""
        fitting, all_names = self.fitting(model).keys(), model.state_dict().keys()
        said = f"{len(fitting)} of {len(all_names)} tensors are those of {self.name}"
        drawn = sorted(all_names - fitting)
        return f"{said}; drawn: {', '.join(drawn[:_NAMED])}{', ...' if len(drawn) > _NAMED else ''}" if drawn else said


def initial_config(name: str, target_config: Any) -> DraftConfig:
    """Return shape and conventions of the drafter, without loading its weights.

    Args:
        target_config: the target's transformers text configuration.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        ConfigError: it is a drafter of another target: hidden size or vocabulary differ.
    """
    config = read_config(local_folder(name, flag="--init", files=DRAFT_FILES))
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, field), getattr(target_config, field)
        if ours != theirs:
            raise ConfigError(
                f"--init {name}: its {field} is {ours} and the target's {theirs}; give a drafter of this target"
            )
    return config


def shape_of(config: DraftConfig) -> dict[str, Any]:
    """Return the settings of `TrainConfig` with which a drafter like this one is trained."""
    extras = {name: getattr(config, name) for name in ("selector_top_k", "conv_kernel_size", "conv_group_size")}
    return {name: value for name, value in extras.items() if value} | {
        "like": config,
        "target_layer_ids": config.target_layer_ids,
        "mask_token_id": config.mask_token_id,
        "block_size": config.gamma,
        "sample_from_anchor": config.sample_from_anchor,
        "num_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type or "vanilla",
        "confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov or not config.enable_confidence_head,
    }
