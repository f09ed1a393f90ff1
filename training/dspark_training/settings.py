"""Settings of a training run: what texts are written, and how the drafter is trained on them.

The command takes its options from here, so this module does without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from msgspec import Meta

from dspark_training.options import Flag
from sglang_dspark.declared import field_types, int_range, validate
from sglang_dspark.draft.config import DraftConfig, MarkovHeadType
from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    import torch

_POSITIVE = Meta(gt=0, description="must be above 0")
_NOT_NEGATIVE = Meta(ge=0, description="must be 0 or more")


def check_fields(config: Any) -> None:
    """Check the declared fields of a dataclass that are not None.

    Raises:
        ConfigError: names the first field that breaks its rule, its value and the rule.
    """
    for name, annotation in field_types(type(config)).items():
        value = getattr(config, name)
        if value is not None and get_origin(annotation) in (Annotated, Literal):
            try:
                validate(value, annotation)
            except ValueError as error:
                raise ConfigError(f"{name}={value!r} {error}") from error


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """Choose the texts that are written."""

    prompts: tuple[str, ...] = ()  # files, folders and data sets of the hub, see conversations.py
    max_prompts: (
        Annotated[int, int_range(1), Flag("Use only so many prompts, drawn with the seed.  [default: all]")] | None
    ) = None
    max_turns: (
        Annotated[int, int_range(1), Flag("Turns of a conversation that are answered.  [default: all]")] | None
    ) = None
    invent: Annotated[int, int_range(0)] = 0  # prompts that the target invents
    texts: Annotated[int, int_range(1), Flag("Answers to train on.  [default: one per prompt]")] | None = None
    held_out: Annotated[int, int_range(1), Flag("Prompts that are only measured on.")] = 32
    temperatures: Annotated[
        tuple[Annotated[float, _NOT_NEGATIVE], ...], Flag("Temperatures of the answers, in turn.")
    ] = (0.0, 0.7, 1.0)
    max_tokens: Annotated[int, int_range(2), Flag("Length limit of an answer.")] = 512
    max_prompt_tokens: Annotated[int, int_range(1), Flag("Leave out longer prompts, template included.")] = 1024
    raw: Annotated[bool, Flag("Continue the prompts as they are, without the chat template.")] = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    seed: Annotated[int, int_range(0)] = 42


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms of the loss, and of the slots of a block.

    Raises:
        ConfigError: a value is out of range.
    """

    ce: Annotated[float, _NOT_NEGATIVE, Flag("Weight of cross-entropy.", "ce-weight")] = 0.1
    l1: Annotated[float, _NOT_NEGATIVE, Flag("Weight of total variation.", "tv-weight")] = 0.9
    confidence: Annotated[float, _NOT_NEGATIVE, Flag("Weight of the confidence head.", "confidence-weight")] = 1.0
    position_decay: Annotated[float, _POSITIVE, Flag("Slots after which a slot's weight has fallen to 1/e.")] = 4.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Shape of the drafter and how to train it; the defaults are the command's.

    Raises:
        ConfigError: a value is out of range.
    """

    # Shape of the drafter; everything else is that of a drafter like this one, or the target's.
    like: DraftConfig | None = None
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: Annotated[int, int_range(1), Flag("Drafts per round.")] = 7
    sample_from_anchor: bool = True  # False = the layout of DFlash, which has a slot more than drafts
    num_layers: Annotated[int, int_range(1)] = 2
    intermediate_size: Annotated[int, int_range(1), Flag("Width of its MLPs.  [default: the target's]")] | None = None
    markov_rank: Annotated[int, int_range(0), Flag("Rank of the Markov head; 0: no such head.", "rank")] = 256
    markov_head_type: Annotated[MarkovHeadType, Flag("Kind of the Markov head.", "head")] = "vanilla"
    selector_top_k: Annotated[int, int_range(1), Flag("Tokens of a slot that a selector chooses from.")] = 16
    conv_kernel_size: Annotated[int, int_range(0), Flag("Taps of convolutions along a block; 0: none.")] = 0
    conv_group_size: Annotated[int, int_range(1), Flag("Channels that share a dynamic kernel.")] = 16
    confidence_head: Annotated[bool, Flag("Whether the drafter has a confidence head.")] = True
    confidence_head_with_markov: bool = True
    draft_vocabulary: Annotated[int, int_range(0), Flag("Propose only so many frequent tokens; 0: all.")] = 0
    own_embeddings: Annotated[bool, Flag("Copy the target's embedding and head into the checkpoint.")] = False

    # Data of one step: batch_rows x gradient_accumulation x processes texts with anchors_per_row blocks each.
    steps: Annotated[int, int_range(1), Flag("Training steps.")] = 3000
    batch_rows: Annotated[int, int_range(1), Flag("Texts that a process reads at a time.")] = 16
    gradient_accumulation: Annotated[int, int_range(1), Flag("How often it reads so many in a step.")] = 1
    anchors_per_row: Annotated[int, int_range(1), Flag("Blocks per text and step.", "anchors")] = 32
    loss_vocab: Annotated[int, int_range(0), Flag("Only so many frequent tokens in the loss; 0: all.")] = 0
    loss_vocab_sampled: int = 1024  # tokens drawn per step to stand for the others, see loss_vocabulary.py
    loss: LossWeights = field(default_factory=LossWeights)

    # Optimizer.
    learning_rate: Annotated[float, _POSITIVE, Flag("Highest learning rate.")] = 6e-4
    markov_lr_scale: Annotated[float, _NOT_NEGATIVE, Flag("Factor on that rate, for the Markov head.")] = 10.0
    schedule: Annotated[
        Literal["cosine", "linear", "constant_with_warmup"], Flag("Course of the learning rate after the warm-up.")
    ] = "cosine"
    warmup_share: Annotated[
        float, Meta(ge=0, lt=1, description="must be in [0, 1)"), Flag("Share of the run in which the rate rises.")
    ] = 0.04
    weight_decay: Annotated[float, _NOT_NEGATIVE, Flag("Weight decay per unit of learning rate.")] = 0.0
    grad_clip: Annotated[float, _POSITIVE, Flag("Largest norm of a step's gradient.")] = 1.0
    patience: (
        Annotated[int, int_range(1), Flag("End after so many checkpoints without a better held-out accept length.")]
        | None
    ) = None
    seed: Annotated[int, int_range(0), Flag("Seed of everything random.")] = 42

    # Parameters and optimizer are float32; matrix products run in compute_dtype.
    compute_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Flag("Dtype of products.  [default: bfloat16 on cuda, else float32]", "dtype", decided=True),
    ] = "float32"
    # Held-out acceptance is measured at every checkpoint.
    checkpoint_every: Annotated[int, int_range(1), Flag("Steps between checkpoints.")] = 200

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def compute_torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype

    def draft_config(self, target_config: Any) -> DraftConfig:
        """Return the drafter's configuration for a target with this transformers text configuration.

        What the target's family does not have (a rotary base, grouped heads, RMS norms) gets Llama's usual value: the
        drafter is a Qwen3-style network whatever the target is.
        """
        with_markov = self.confidence_head and self.confidence_head_with_markov and self.markov_rank > 0
        head = self.markov_head_type if self.markov_rank else None
        shape: dict[str, Any] = {
            "intermediate_size": self.intermediate_size
            or getattr(target_config, "intermediate_size", None)
            or 4 * target_config.hidden_size,
            "num_hidden_layers": self.num_layers,
            "block_size": self.block_size + (not self.sample_from_anchor),  # slots in the network
            "sample_from_anchor": self.sample_from_anchor,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
            "num_target_layers": target_config.num_hidden_layers,
            "markov_rank": self.markov_rank,
            "markov_head_type": head,
            "selector_top_k": self.selector_top_k if head == "selector" else None,
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size if self.conv_kernel_size else 0,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": with_markov,
            "num_anchors": self.anchors_per_row,
            "origin": "TrainConfig",
        }
        if self.like is not None:
            for name in ("layer_types", "causal_layers", "sink_layers"):
                # Further layers are like the last one.
                kinds = getattr(self.like, name)
                shape[name] = (kinds + kinds[-1:] * self.num_layers)[: self.num_layers]
            return replace(self.like, draft_vocab_size=None, **shape)
        heads = target_config.num_attention_heads
        return DraftConfig(
            hidden_size=target_config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
            vocab_size=target_config.vocab_size,
            rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(target_config),
            max_position_embeddings=target_config.max_position_embeddings,
            **shape,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        like = None if self.like is None else self.like.to_dict()
        return content | {"loss": vars(self.loss), "target_layer_ids": list(self.target_layer_ids), "like": like}


def _rope_theta(target_config: Any) -> float:
    """Return the base of the target's rotary embedding, of its global layers where layers differ."""
    parameters = getattr(target_config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", 10_000.0))
