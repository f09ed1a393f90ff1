"""Holds what all writers of drafters share: a target, its states, weights that matter, what is kept of a drafter.

A writer runs among the packages of its trainer, so this module imports nothing of this repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, MASK, LENGTH, BLOCK = 61, 60, 24, 5
TAPS = (3, 1, 4)  # not in order, and the output of the target's first layer is number 0
ANCHORS = (1, 2, 7, 12, 18)
RECORD = "record.safetensors"


@dataclass(frozen=True)
class Target:
    """A tiny target with random weights, and a text that it has read.

    Attributes:
        folder: its files.
        model: Qwen3ForCausalLM.
        ids: [LENGTH] the text.
        hidden: [layers + 1, LENGTH, d] as transformers returns hidden states: the embedding's output comes first.
    """

    folder: Path
    model: nn.Module
    ids: Tensor
    hidden: Tensor

    def features(self, taps: Iterable[int]) -> Tensor:
        """Return ``[1, LENGTH, len(taps) * d]``, the outputs of these layers side by side."""
        return torch.cat([self.hidden[tap + 1] for tap in taps], dim=-1)[None]


def make_target(folder: Path, *, rope_theta: float = 500.0) -> Target:
    """Write a target and make up its hidden states; a trainer only ever reads them."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=False,
    )
    model = spread(Qwen3ForCausalLM(config))
    model.save_pretrained(folder)
    return Target(folder, model, torch.randint(0, MASK, (LENGTH,)), torch.randn(7, LENGTH, 32))


def spread(module: nn.Module, keep: tuple[str, ...] = ()) -> nn.Module:
    """Give all parameters values that matter, but for those whose names contain one of ``keep``."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not any(part in name for part in keep):
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return module.eval()


def keep(
    folder: Path, target: Target, hidden: Tensor, logits: Tensor, tokens: Tensor, confidence: Tensor | None = None
) -> None:
    """Keep what the trainer's own network makes of the target's hidden states, beside the drafter's files.

    Args:
        hidden: [anchors, slots, d] after the final norm, of the slots that predict.
        logits: [anchors, slots, v] before the Markov bias.
        tokens: [anchors, slots] the greedy drafts.
        confidence: [anchors, slots] logits of the confidence head along these drafts.
    """
    record = {"ids": target.ids, "target_hidden": target.hidden, "hidden": hidden, "logits": logits, "tokens": tokens}
    record["embed"], record["lm_head"] = target.model.model.embed_tokens.weight, target.model.lm_head.weight
    if confidence is not None:
        record["confidence"] = confidence
    save_file({name: tensor.detach().contiguous() for name, tensor in record.items()}, folder / RECORD)


def walk(anchors: Tensor, slots: int, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Draft slot after slot.

    Args:
        anchors: [n] tokens before the first draft.
        choose: the tokens [n] of a slot, given its number and the tokens [n, slots] before each slot.

    Returns:
        [n, slots].
    """
    previous = anchors[:, None].repeat(1, slots + 1)
    for slot in range(slots):
        previous[:, slot + 1] = choose(slot, previous[:, :slots])
    return previous[:, 1:]
