"""A checkpoint in words: its format, the switches of its network, and what reading it puts in order."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats.reading import Reading


def switches(config: DraftConfig) -> list[str]:
    """What the network does that DeepSpec's does not; empty for one of DeepSpec's."""
    found = []
    if not config.sample_from_anchor:
        found.append(f"{config.block_size} slots of which the anchor's does not predict")
    seen = list(enumerate(config.visibilities))
    if windowed := [layer for layer, visibility in seen if visibility.window is not None]:
        start = "before the anchor" if config.window_from_anchor else "that slides along with the slots"
        found.append(f"window of {config.sliding_window} rows {start} in {_layers(windowed, config)}")
    if causal := [layer for layer, visibility in seen if visibility.causal]:
        found.append(f"causal block in {_layers(causal, config)}")
    if config.draft_vocab_size is not None:
        found.append(f"heads for {config.draft_vocab_size} of {config.vocab_size} tokens")
    if config.rope_scaling is not None:
        found.append(f"RoPE of type {config.rope_scaling.rope_type}, factor {config.rope_scaling.factor:g}")
    if config.partial_rotary_factor != 1:
        found.append(f"RoPE of {config.partial_rotary_factor:g} of the channel pairs")
    if config.attention_bias:
        found.append("biases in the attention")
    return found


def adjustments(reading: Reading) -> list[str]:
    """What reading changes in the order of the tensors' rows and columns, and in their names."""
    found = []
    if reading.rules.renamed:
        found.append("names of the heads' tensors")
    if reading.rules.tap_order:
        found.append("taps in ascending order, the columns of fc with them")
    if reading.rules.rotary_order:
        found.append("channels of queries and keys such that RoPE pairs the halves of a head")
    return found


def describe(config: DraftConfig) -> str:
    """Block size, layers, taps, heads and switches in one line."""
    markov, confidence = "no Markov head", "no confidence head"
    if config.markov_rank:
        markov = f"{config.markov_head_type} Markov head of rank {config.markov_rank}"
    if config.enable_confidence_head:
        confidence = f"confidence head {'with' if config.confidence_head_with_markov else 'without'} Markov features"
    depth = "" if config.num_target_layers is None else f" of {config.num_target_layers}"
    parts = [
        f"{config.gamma} drafts per block",
        f"{config.num_hidden_layers} layers",
        f"taps {list(config.target_layer_ids)}{depth}",
        markov,
        confidence,
    ]
    return ", ".join(parts + switches(config))


def _layers(layers: Sequence[int], config: DraftConfig) -> str:
    if len(layers) == config.num_hidden_layers:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
