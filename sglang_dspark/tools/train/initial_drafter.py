"""A drafter to begin a run with, of any format that loads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
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
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
# Matrices that may be larger than the drafter's, where a rank or the width of an MLP grows, and the dimension that
# does. What is new of the second kind is zero, so that what is new of the first has no effect before the first step.
_READS = {_W1: 1, "mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0}
_WRITES = {_W2: 1, "confidence_head.proj.weight": 1, "mlp.down_proj.weight": 1}
# What a layer adds to its input comes out of these.
_LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
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
        own: these two, where the checkpoint has them.
        token_ids: the tokens that it proposes, ascending; None = all.
    """

    name: str
    config: DraftConfig
    tensors: dict[str, Tensor]
    own: dict[str, Tensor]
    token_ids: list[int] | None

    @classmethod
    def load(cls, name: str) -> InitialDrafter:
        """From a folder, or a repository of the Hugging Face hub.

        Raises:
            CheckpointError: as for `initial_config`, or it does not load.
        """
        folder = initial_folder(name)
        model = load_draft_model(folder, dtype=torch.float32, device="cpu")
        tensors: dict[str, Tensor] = model.state_dict()
        own = {part: tensors.pop(part) for part in (EMBEDDING, LM_HEAD) if part in tensors}
        ids = model.token_ids
        if ids is None:
            return cls(name, model.config, tensors, own, load_token_ids(folder, model.config.vocab_size))
        if _W2 in tensors:
            # Tokens that it has no row for get one of zeros: no bias.
            rows = tensors[_W2]
            tensors[_W2] = rows.new_zeros(model.config.vocab_size, rows.shape[1]).index_copy(0, ids, rows)
        return cls(name, model.config, tensors, own, ids.tolist())

    def fitting(self, model: DraftModel) -> dict[str, Tensor]:
        """The tensors that `model` has in the same shape; the projection only where it reads the same taps."""
        ours = self._comparable(model)
        return {name: w for name, w in self.tensors.items() if name in ours and w.shape == ours[name].shape}

    def enlarged(self, model: DraftModel) -> list[str]:
        """Names of the tensors of which `model` has more than this drafter, and can go on with what it has."""
        ours = self._comparable(model)
        return [
            name
            for name, weight in self.tensors.items()
            if name in ours and self._may_grow(name, weight.shape, ours[name].shape, model.config.markov_head_type)
        ]

    def give(self, model: DraftModel) -> None:
        """Put the tensors that fit into `model`, and into larger ones; further layers begin without effect.

        Raises:
            ConfigError: none does.
        """
        fitting = self.fitting(model)
        if not fitting:
            raise ConfigError(f"--init {self.name}: no tensor has a shape of the drafter to be trained; leave it out")
        ours: dict[str, Tensor] = model.state_dict()
        larger = {name: _larger(name, self.tensors[name], ours[name]) for name in self.enlarged(model)}
        silent = {name: torch.zeros_like(ours[name]) for name in self._silent(model)}
        model.load_state_dict(fitting | larger | silent, strict=False)

    def account(self, model: DraftModel) -> str:
        """What `model` has of this drafter, in words."""
        fitting, enlarged, all_names = self.fitting(model).keys(), self.enlarged(model), model.state_dict().keys()
        said = f"{len(fitting)} of {len(all_names)} tensors are those of {self.name}"
        if enlarged:
            said += f"; enlarged: {_listed(enlarged)}"
        drawn = all_names - fitting - set(enlarged) - set(self._silent(model))
        if drawn:
            said += f"; drawn anew: {_listed(drawn)}"
        if self._silent(model):
            said += "; the further layers begin without effect"
        replaced = [
            name for name, weight in self.own.items() if not _is_of(weight, name, model, self.config, self.token_ids)
        ]
        if replaced:
            said += f"; the target's stand in for its own {' and '.join(replaced)}"
        return said

    def _comparable(self, model: DraftModel) -> dict[str, Tensor]:
        ours: dict[str, Tensor] = model.state_dict()
        if model.config.target_layer_ids != self.config.target_layer_ids:
            del ours[_PROJECTION]
        return ours

    def _may_grow(self, name: str, theirs: torch.Size, ours: torch.Size, head: str | None) -> bool:
        growing = next((dim for suffix, dim in (_READS | _WRITES).items() if name.endswith(suffix)), None)
        if growing is None or len(theirs) != len(ours):
            return False
        # The other heads multiply or feed back their latents, so that nothing new stays without effect.
        plain = self.config.markov_head_type == head == "vanilla" or ".mlp." in name
        return plain and theirs[growing] < ours[growing] and theirs[1 - growing] == ours[1 - growing]

    def _silent(self, model: DraftModel) -> list[str]:
        """Tensors through which the layers that this drafter lacks add to their input."""
        lacking = range(self.config.num_hidden_layers, model.config.num_hidden_layers)
        return [f"layers.{layer}.{output}" for layer in lacking for output in _LAYER_OUTPUTS]


def _larger(name: str, weight: Tensor, ours: Tensor) -> Tensor:
    """`ours` with the values of `weight` in its corner; the rest is zero where it would have an effect at once."""
    larger = torch.zeros_like(ours) if name.endswith(tuple(_WRITES)) else ours.clone()
    larger[: weight.shape[0], : weight.shape[1]] = weight
    return larger


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def initial_folder(name: str) -> Path:
    """Where the drafter lies, downloaded if need be.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    return Path(local_folder(name, flag="--init", files=DRAFT_FILES))


def initial_config(name: str, target_config: Any) -> DraftConfig:
    """Shape and conventions of the drafter, without its weights.

    Args:
        target_config: the target's transformers text configuration.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        ConfigError: it is a drafter of another target: hidden size or vocabulary differ.
    """
    config = read_config(initial_folder(name))
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, field), getattr(target_config, field)
        if ours != theirs:
            raise ConfigError(
                f"--init {name}: its {field} is {ours} and the target's {theirs}; give a drafter of this target"
            )
    return config


def shape_of(config: DraftConfig) -> dict[str, Any]:
    """The settings of `TrainConfig` with which a drafter like this one is trained."""
    return {
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


def _is_of(weight: Tensor, name: str, model: DraftModel, config: DraftConfig, token_ids: list[int] | None) -> bool:
    """Whether an own embedding or LM head of a drafter is that of the target to which `model` is bound."""
    targets = model.embed_weight if name == EMBEDDING else model.lm_head_weight
    if name == LM_HEAD and config.draft_vocab_size is not None:
        targets = targets[token_ids]
    return torch.equal(weight.to(targets.device, targets.dtype), targets)
