"""Configuration of a drafter: everything about its network that its tensors alone do not say.

Checkpoints are published in several formats; ``sglang_dspark.draft.formats`` reads them all into this one.

Whether a drafter belongs to a target is decided from the two configurations, before anything is loaded.

Slot k of a block stands at position p + k, p being the anchor's. ``age`` of a context row is its distance before the
anchor, p - j >= 1 for the row at position j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from sglang_dspark.declared import REMEDY, Count, Index, Positive, check
from sglang_dspark.draft.rope import RopeScaling, rotary_dim, score_factor
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The rows that one layer sees.

    Attributes:
        window: width of a sliding window; None sees the whole context.
        from_anchor: the window holds the ``window`` rows before the anchor, for all slots alike. Otherwise it slides
            with the slot, which counts as one of its rows: slot k sees ``age <= window - 1 - k``, and of the block the
            slots above k - window.
        causal: a slot sees the block up to itself, not all of it.
    """

    window: int | None = None
    from_anchor: bool = False
    causal: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether everything is seen."""
        return self.window is None and not self.causal

    @property
    def slides(self) -> bool:
        """Return whether the slots of a block see different parts of the context."""
        return self.window is not None and not self.from_anchor

    @property
    def reach(self) -> int | None:
        """Return the age of the oldest context row that any slot sees; None without a limit."""
        return self.window if self.window is None or self.from_anchor else self.window - 1

    def sees_context(self, ages: Tensor, slots: Tensor) -> Tensor:
        """Return a bool of the shape that ``ages`` (at least 1) and ``slots`` broadcast to."""
        if self.window is None:
            return ages + slots > 0
        return (ages <= self.window) & (slots >= 0) if self.from_anchor else ages + slots < self.window

    def sees_block(self, slots: Tensor) -> Tensor:
        """Return, for ``slots`` 0..n-1 of a block, ``[n, n]`` bool, a row per query slot."""
        ahead = slots - slots[:, None]
        seen = ahead <= (0 if self.causal else len(slots))
        return seen & (-ahead < (self.window or 0)) if self.slides else seen


BackboneName = Literal["qwen3", "gemma4"]
ARCHITECTURES: dict[BackboneName, str] = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}
"""DeepSpec's classes by the layers of their backbone."""
MarkovHeadType = Literal["vanilla", "gated", "rnn", "selector"]
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = get_args(MarkovHeadType)
EMBEDDING_TAP = -1
"""The entry of ``target_layer_ids`` that stands for the target's embedding output."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape and conventions of a drafter's network. Types, bounds and the rules between fields hold for any instance.

    Sizes and lengths are counts of elements or tokens.

    Attributes:
        backbone: whose layers it has.
        attention_k_eq_v: values are the keys before their norm and rotation, as in Gemma 4.
        block_size: input slots of a block: the anchor, and masks after it.
        sample_from_anchor: the anchor's slot predicts too, so that a block has as many drafts as slots. Otherwise (the
            layout of DFlash, 1 + N slots) its output is not used and the other slots predict.
        target_layer_ids: 0-based target decoder layers whose *output* is tapped, ascending; -1 is the embedding output.
        num_target_layers: depth of the target; None if the checkpoint does not say.
        vocab_size: of the target.
        draft_vocab_size: tokens that the drafter proposes; LM head and Markov biases have rows only for them. None
            stands for all.
        markov_rank: 0 means no Markov head, in which case ``markov_head_type`` is None.
        layer_types: attention of each layer; empty stands for full attention in all of them.
        sliding_window: width of the window of sliding layers.
        window_from_anchor: see :class:`Visibility`, as for the next.
        causal_layers: for each layer whether its slots see the block only up to themselves; empty stands for no layer.
        rope_theta, rope_scaling, partial_rotary_factor: rotary embedding. Channel i of a head is paired with channel
            i + head_dim / 2, and the first share ``partial_rotary_factor`` of the pairs rotates.
        attention_bias: the projections to queries, keys, values and output have biases.
        sink_layers: for each layer whether its heads have attention sinks; empty stands for no layer.
        attention_value_scale: factor of the values in every layer's attention.
        conv_kernel_size, conv_group_size: taps of the convolutions round attention and MLP, and channels that share a
            dynamic kernel (DFlash 2); 0 without convolutions.
        selector_top_k: tokens of a slot that the selector chooses from; None with any other Markov head.
        output_multiplier: factor of the logits before the Markov bias, and before their bound.
        final_logit_softcapping: bound c of the logits before the Markov bias, which become c * tanh(logits / c); None
            leaves them as they are.
        num_anchors: training only; carried so that a rewritten config.json still loads in DeepSpec.
        origin: where the values came from, for messages.
    """

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    rms_norm_eps: Positive
    rope_theta: Positive
    max_position_embeddings: Count
    block_size: Count
    mask_token_id: Index
    target_layer_ids: tuple[int, ...]
    num_target_layers: Count | None
    markov_rank: Index
    markov_head_type: MarkovHeadType | None
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    backbone: BackboneName = "qwen3"
    attention_k_eq_v: bool = False
    sample_from_anchor: bool = True
    draft_vocab_size: Count | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: Count | None = None
    window_from_anchor: bool = False
    causal_layers: tuple[bool, ...] = ()
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: Positive = 1.0
    attention_bias: bool = False
    sink_layers: tuple[bool, ...] = ()
    attention_value_scale: Positive = 1.0
    conv_kernel_size: Index = 0
    conv_group_size: Index = 0
    selector_top_k: Count | None = None
    output_multiplier: Positive = 1.0
    final_logit_softcapping: Positive | None = None
    num_anchors: Count | None = None
    origin: str = field(default="DraftConfig", compare=False, repr=False)

    def __post_init__(self) -> None:
        check(DraftConfig, vars(self), origin=self.origin)
        for key, is_broken, rule in _rules(self):
            if is_broken:
                raise CheckpointError(f"{self.origin}: {key}={getattr(self, key)!r} {rule}: {REMEDY}")

    @property
    def gamma(self) -> int:
        """Return the number of drafts of a block."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """Return the first slot that predicts."""
        return 0 if self.sample_from_anchor else 1

    def drawn(self, gamma: int) -> int:
        """Return how many of ``gamma`` drafts of a block the network proposes; later ones are copied."""
        return min(gamma, self.gamma)

    def num_slots(self, gamma: int) -> int:
        """Return the rows in the network of a block of ``gamma`` drafts."""
        return self.first_slot + self.drawn(gamma)

    @property
    def num_taps(self) -> int:
        """Return m, the number of tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def predicts_acceptance(self) -> bool:
        """Return whether the drafter says how likely its drafts are accepted: with a confidence head or a selector."""
        return self.enable_confidence_head or self.selector_top_k is not None

    @property
    def num_proposed(self) -> int:
        """Return the number of rows of the LM head and of the Markov biases."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def attention_scale(self) -> float:
        """Return the factor of the products of queries and keys."""
        factor = score_factor(self.rope_scaling)
        return factor if self.backbone == "gemma4" else float(self.head_dim**-0.5) * factor

    @property
    def embed_scale(self) -> float | None:
        """Return the factor of the slots' embeddings, before it is rounded to their dtype; None for the target's."""
        return float(self.hidden_size**0.5) if self.backbone == "gemma4" else None

    @property
    def visibilities(self) -> tuple[Visibility, ...]:
        """Return the part of the context that each layer's attention sees."""
        types = self.layer_types or (FULL,) * self.num_hidden_layers
        causal = self.causal_layers or (False,) * self.num_hidden_layers
        return tuple(
            Visibility(
                window=self.sliding_window if layer_type == SLIDING else None,
                from_anchor=self.window_from_anchor,
                causal=is_causal,
            )
            for layer_type, is_causal in zip(types, causal, strict=True)
        )

    @property
    def sinks(self) -> tuple[bool, ...]:
        """Return ``sink_layers``, one for each layer."""
        return self.sink_layers or (False,) * self.num_hidden_layers

    def to_dict(self) -> dict[str, Any]:
        """Return config.json in DeepSpec's form; keys that DeepSpec lacks are written only if they say something."""
        content: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.backbone]],
            "tie_word_embeddings": False,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "layer_types": list(self.layer_types or (FULL,) * self.num_hidden_layers),
            **self._keys_of_backbone(),
        }
        apart = {"rope_theta", "rope_scaling", "partial_rotary_factor", "layer_types", "causal_layers"}
        apart |= {"backbone", "origin"}
        if not self.markov_rank:
            apart.add("markov_head_type")
        if not self.enable_confidence_head:
            apart.add("confidence_head_with_markov")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in apart and value != f.default:
                content[f.name] = list(value) if isinstance(value, tuple) else value
        if self.causal_layers or self.sliding_window is not None:
            # Without the list, readers take sliding layers for causal ones.
            content["causal_layers"] = [visibility.causal for visibility in self.visibilities]
        if self.sliding_window is not None:
            content["use_sliding_window"] = True
        return content

    def _keys_of_backbone(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= self.rope_scaling.to_dict()
        if self.partial_rotary_factor != 1.0:
            rope |= {"partial_rotary_factor": self.partial_rotary_factor, "rotary_pairs": "whole_head"}
        if self.backbone == "qwen3":
            return {"model_type": "qwen3", "hidden_act": "silu", "rope_parameters": rope}
        return {
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "global_head_dim": self.head_dim,
            **({"num_global_key_value_heads": self.num_key_value_heads} if self.attention_k_eq_v else {}),
            "rope_parameters": {FULL: rope},
        }


def _rules(config: DraftConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield the rules between fields; those of single fields are in their types.

    Each one has a field, whether that breaks the rule, and the rule in words. No rule is asked for after a broken one.
    """
    taps, depth = config.target_layer_ids, config.num_target_layers
    heads, vocab_size = config.num_attention_heads, config.vocab_size
    yield "num_key_value_heads", heads % config.num_key_value_heads, f"does not divide num_attention_heads={heads}"
    yield "head_dim", config.head_dim % 2, "is odd, but rotary embeddings need pairs"
    outside = config.mask_token_id >= vocab_size
    yield "mask_token_id", outside, f"is outside the vocabulary of vocab_size={vocab_size}"
    yield "draft_vocab_size", config.num_proposed > vocab_size, f"is larger than vocab_size={vocab_size}"
    yield "block_size", not config.gamma, "leaves no slot that predicts, because sample_from_anchor is false"

    is_unordered = any(later <= earlier for earlier, later in pairwise(taps))
    yield "target_layer_ids", is_unordered, "is not strictly increasing"
    outside = not taps or taps[0] < EMBEDDING_TAP
    yield "target_layer_ids", outside, "must hold layers from -1 on, and at least one"
    if depth is not None:
        words = f"must lie in [-1, {depth - 2}] for num_target_layers={depth} (the last layer cannot be tapped)"
        yield "target_layer_ids", taps[-1] > depth - 2, words

    yield from _rules_of_heads(config)
    for key in ("layer_types", "causal_layers", "sink_layers"):
        is_other = len(getattr(config, key)) not in (0, config.num_hidden_layers)
        yield key, is_other, f"must have one entry per layer, num_hidden_layers={config.num_hidden_layers}"
    lacks_width = SLIDING in config.layer_types and config.sliding_window is None
    yield "sliding_window", lacks_width, "must give the width of the sliding_attention layers in layer_types"

    conv_taps, size = config.conv_kernel_size, config.conv_group_size
    yield "conv_group_size", bool(conv_taps) != bool(size), f"contradicts conv_kernel_size={conv_taps}"
    yield "conv_group_size", size and config.hidden_size % size, f"does not divide hidden_size={config.hidden_size}"
    yield "conv_kernel_size", conv_taps > config.block_size, f"exceeds block_size={config.block_size}"

    if config.backbone == "qwen3":
        yield "attention_k_eq_v", config.attention_k_eq_v, "needs Gemma 4's layers"
    else:
        for key in ("attention_bias", "sink_layers", "attention_value_scale", "sliding_window", "conv_kernel_size"):
            is_other = getattr(config, key) != getattr(DraftConfig, key)
            yield key, is_other, "is not supported in Gemma 4's layers"

    share, rotated = config.partial_rotary_factor, rotary_dim(config.head_dim, config.partial_rotary_factor)
    is_unfit = share > 1 or rotated < 2 or rotated % 2
    yield "partial_rotary_factor", is_unfit, f"rotates {rotated} of head_dim={config.head_dim} channels"
    is_unfit = share != 1 and score_factor(config.rope_scaling) != 1
    yield "partial_rotary_factor", is_unfit, "together with YaRN's attention factor is not supported"


def _rules_of_heads(config: DraftConfig) -> Iterator[tuple[str, Any, str]]:
    kind, key = config.markov_head_type, "confidence_head_with_markov"
    words = f"must be one of {', '.join(MARKOV_HEAD_TYPES)} because markov_rank is not 0"
    yield "markov_head_type", config.markov_rank and kind is None, words
    is_other = (kind == "selector") != (config.selector_top_k is not None)
    yield "selector_top_k", is_other, f"contradicts markov_head_type={kind!r}"
    words = "with sample_from_anchor=false is not supported; only vanilla and gated are"
    yield "markov_head_type", kind == "rnn" and not config.sample_from_anchor, words
    reads_markov = config.confidence_head_with_markov
    yield key, reads_markov and not config.enable_confidence_head, "contradicts enable_confidence_head=False"
    yield key, reads_markov and not config.markov_rank, "needs a Markov head, but markov_rank=0"


def lacks_own(draft: DraftConfig, layer: str, reason: str) -> CheckpointError:
    """Return the error of a drafter that would have to read a layer of its target, and cannot.

    Args:
        layer: ``embed_tokens`` or ``lm_head``.
        reason: why the target's cannot be read, as in "is quantised (fp8)".
    """
    return CheckpointError(
        f"{draft.origin}: has no {layer}.weight of its own, and the target's {layer} {reason}; use a drafter with a "
        f"{layer} of its own, or a target whose {layer} is stored in plain floating point"
    )


def check_dimensions(draft: DraftConfig, target: Any) -> None:
    """Refuse a drafter that was made for another target, of whatever family.

    Raises:
        CheckpointError: naming the first dimension that differs.
    """
    depth = target.num_hidden_layers
    for key, target_key, value in (
        ("hidden_size", "hidden_size", target.hidden_size),
        ("vocab_size", "vocab_size", target.vocab_size),
        ("num_target_layers", "num_hidden_layers", depth),
    ):
        if getattr(draft, key) not in (None, value):
            raise CheckpointError(
                f"{draft.origin}: {key}={getattr(draft, key)}, but the target has {target_key}={value}; use the draft "
                "that was trained for this target"
            )
    if draft.target_layer_ids[-1] > depth - 2:
        raise CheckpointError(
            f"{draft.origin}: reads the output of layer {draft.target_layer_ids[-1]}, counted from 0, of a target with "
            f"{depth} layers; layers up to {depth - 2} can be read. Use another drafter of this target"
        )
