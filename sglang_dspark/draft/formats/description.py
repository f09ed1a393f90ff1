"""A drafter's network in words, and its switches."""

from collections.abc import Sequence

from sglang_dspark.draft.config import DraftConfig


def switches(config: DraftConfig) -> list[str]:
    """Return the ways in which the network differs from DeepSpec's, in words; none for one of DeepSpec's."""
    found = []
    if config.backbone == "gemma4":
        found.append(f"layers of Gemma 4{', whose values are the keys' if config.attention_k_eq_v else ''}")
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
        found.append(f"RoPE of type {config.rope_scaling.rope_type}, factor {config.rope_scaling.factor or 1:g}")
    if config.partial_rotary_factor != 1:
        found.append(f"RoPE of {config.partial_rotary_factor:g} of the channel pairs")
    if config.attention_bias:
        found.append("biases in the attention")
    if layers := [layer for layer, has_sinks in enumerate(config.sinks) if has_sinks]:
        found.append(f"attention sinks in {_layers(layers, config)}")
    if config.conv_kernel_size:
        found.append(f"convolutions of {config.conv_kernel_size} taps")
    numbers = {
        "values times": (config.attention_value_scale, 1),
        "logits times": (config.output_multiplier, 1),
        "logits capped at": (config.final_logit_softcapping, None),
    }
    return found + [f"{words} {value:g}" for words, (value, usual) in numbers.items() if value != usual]


def describe(config: DraftConfig) -> str:
    """Return block size, layers, taps, heads and switches in one line."""
    markov, confidence = "no Markov head", "no confidence head"
    if config.markov_rank:
        markov = f"{config.markov_head_type} Markov head of rank {config.markov_rank}"
    if config.selector_top_k is not None:
        markov = f"selector of rank {config.markov_rank} among {config.selector_top_k} tokens"
        confidence = "confidence by the selector"
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
