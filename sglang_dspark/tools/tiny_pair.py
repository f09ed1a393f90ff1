"""A tiny pair with random weights, whose drafts are right at times.

The target writes mostly what follows from its last token, and attention to the tokens before changes that at times. The
drafter's Markov head knows the first part exactly and nothing of the second. Weights as SGLang makes them for
``--load-format dummy`` would not do: all tokens are nearly tied then, and no draft is ever right.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.weights import random_draft_model, save_draft_model

VOCABULARY = 4096
# Kernels meet the head size of most targets, and several K/V heads with several query heads each.
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_TARGET_LAYERS = 4
_DRAFTER = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_hidden_layers": 2,
    "num_target_layers": _TARGET_LAYERS,
    "target_layer_ids": [0, 1, 2],
    "block_size": 7,
    "mask_token_id": 0,
    "markov_head_type": "vanilla",
    "markov_rank": _SHAPE["hidden_size"],
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# With these, about two thirds of the first drafts are right, and one token in thirty is nearly tied with the next best.
_LAYER_STD, _HEAD_STD, _SUCCESSOR, _BACKBONE = 0.05, 0.25, 0.1, 0.3


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Write the pair, the same one every time, and return the folders of target and drafter. There is no tokenizer."""
    target_dir, draft_dir = folder / "target", folder / "draft"
    torch.manual_seed(0)
    config = Qwen3Config(
        **_SHAPE,
        num_hidden_layers=_TARGET_LAYERS,
        initializer_range=_LAYER_STD,
        architectures=["Qwen3ForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    )
    target = Qwen3ForCausalLM(config)
    shape = read_content(_SHAPE | _DRAFTER, origin="tiny pair").config
    drafter = random_draft_model(shape, dtype=torch.float32, device="cpu")
    assert drafter.markov_head is not None
    with torch.no_grad():
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        embedding.normal_()
        head.normal_(std=_HEAD_STD).add_(embedding.roll(1, 0), alpha=_SUCCESSOR)
        drafter.norm.weight.fill_(_BACKBONE)
        drafter.markov_head.markov_w1.weight.copy_(embedding)
        drafter.markov_head.markov_w2.weight.copy_(head)
    config.save_pretrained(target_dir)
    save_file(target.state_dict(), target_dir / "model.safetensors", {"format": "pt"})
    save_draft_model(drafter, draft_dir, include_embeddings=False)
    return target_dir, draft_dir
