"""Configuration of a DSpark draft checkpoint: DeepSpec's ``config.json`` as a checked, typed object."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dspark.errors import CheckpointError

SUPPORTED_ARCHITECTURE = "Qwen3DSparkModel"
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
EMBEDDING_TAP = -1
"""The entry of ``target_layer_ids`` that stands for the target's embedding output."""
REMEDY = "take the config.json that belongs to the checkpoint"


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything about a draft checkpoint that its tensors alone do not say.

    :meth:`from_pretrained` and :meth:`from_dict` check every key; the rules between keys hold for any instance. Sizes
    and lengths are counts of elements or tokens.

    ``block_size`` (gamma) counts the drafts of one round and equally the input slots of the block: the anchor slot
    predicts too. ``target_layer_ids`` are 0-based target decoder layers whose *output* is tapped; -1 is the embedding
    output.
    ``markov_rank == 0`` means no Markov head, in which case ``markov_head_type`` is None.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str | None
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    num_anchors: int | None = None  # training only; carried so that a rewritten config.json still loads in DeepSpec
    attention_bias: bool = False
    hidden_act: str = "silu"
    origin: str = field(default="DraftConfig", compare=False, repr=False)  # where the values came from, for messages

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_taps(self) -> int:
        """m, the number of tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def confidence_input_size(self) -> int:
        """Width of the confidence head's input: d, plus r when it reads the Markov embedding."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "DraftConfig":
        """Read ``config.json`` of the checkpoint directory ``path``.

        Raises:
            CheckpointError: the file is absent or not JSON, or a key is missing, malformed, contradictory or
                unsupported.
        """
        file = Path(path) / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error.strerror}); give the directory of a downloaded DSpark draft checkpoint"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{file}: is not valid JSON ({error}); download the checkpoint again") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{file}: holds a {type(content).__name__}, not an object; download it again")
        return cls.from_dict(content, origin=str(file))

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, origin: str) -> "DraftConfig":
        """Check a decoded ``config.json``; ``origin`` (a file name) opens every error message.

        Raises:
            CheckpointError: a key is missing, malformed, contradictory or unsupported.
        """
        _check_architecture(d, origin)
        read = _Reader(d, origin)
        read.constant("attention_bias", False)
        read.constant("hidden_act", "silu")
        read.constant("tie_word_embeddings", False)
        num_hidden_layers = read.integer("num_hidden_layers", minimum=1)
        _check_layer_types(read, num_hidden_layers)
        markov_rank = read.integer("markov_rank", minimum=0)
        enable_confidence_head = read.boolean("enable_confidence_head")
        return cls(
            hidden_size=read.integer("hidden_size", minimum=1),
            intermediate_size=read.integer("intermediate_size", minimum=1),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=read.integer("num_attention_heads", minimum=1),
            num_key_value_heads=read.integer("num_key_value_heads", minimum=1),
            head_dim=read.integer("head_dim", minimum=2),
            vocab_size=read.integer("vocab_size", minimum=1),
            rms_norm_eps=read.positive("rms_norm_eps"),
            rope_theta=_rope_theta(read),
            max_position_embeddings=read.integer("max_position_embeddings", minimum=1),
            block_size=read.integer("block_size", minimum=1),
            mask_token_id=read.integer("mask_token_id", minimum=0),
            target_layer_ids=read.integers("target_layer_ids"),
            num_target_layers=read.integer("num_target_layers", minimum=1),
            markov_rank=markov_rank,
            markov_head_type=read.choice("markov_head_type", MARKOV_HEAD_TYPES) if markov_rank else None,
            enable_confidence_head=enable_confidence_head,
            confidence_head_with_markov=enable_confidence_head and read.boolean("confidence_head_with_markov"),
            num_anchors=read.integer("num_anchors", minimum=1) if "num_anchors" in d else None,
            origin=origin,
        )

    def check_target(self, *, hidden_size: int, vocab_size: int, num_hidden_layers: int) -> None:
        """Check that a target of these dimensions is one the draft can have been trained for.

        Raises:
            CheckpointError: naming the first dimension that differs.
        """
        for key, target_key, value in (
            ("hidden_size", "hidden_size", hidden_size),
            ("vocab_size", "vocab_size", vocab_size),
            ("num_target_layers", "num_hidden_layers", num_hidden_layers),
        ):
            if getattr(self, key) != value:
                raise CheckpointError(
                    f"{self.origin}: {key}={getattr(self, key)}, but the target has {target_key}={value}; use the "
                    "draft that was trained for this target"
                )

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` content that DeepSpec and :meth:`from_dict` read; conditional keys where they apply."""
        content: dict[str, Any] = {
            "architectures": [SUPPORTED_ARCHITECTURE],
            "model_type": "qwen3",
            "tie_word_embeddings": False,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": self.hidden_act,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.max_position_embeddings,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "num_target_layers": self.num_target_layers,
            "markov_rank": self.markov_rank,
            "enable_confidence_head": self.enable_confidence_head,
        }
        if self.num_anchors is not None:
            content["num_anchors"] = self.num_anchors
        if self.markov_rank:
            content["markov_head_type"] = self.markov_head_type
        if self.enable_confidence_head:
            content["confidence_head_with_markov"] = self.confidence_head_with_markov
        return content


class _Reader:
    """Typed access to one decoded config; every failure names the file, the key, the value and the remedy."""

    def __init__(self, content: Mapping[str, Any], origin: str) -> None:
        self.content = content
        self.origin = origin

    def error(self, key: str, expected: str) -> CheckpointError:
        if key not in self.content:
            return CheckpointError(
                f"{self.origin}: key {key!r} is missing; expected {expected}. DeepSpec writes this key: {REMEDY}"
            )
        return CheckpointError(f"{self.origin}: {key}={self.content[key]!r}; expected {expected}: {REMEDY}")

    def integer(self, key: str, *, minimum: int) -> int:
        value = self.content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"an integer of at least {minimum}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.content.get(key)
        integers = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not value or not integers:
            raise self.error(key, "a non-empty list of integers")
        return tuple(value)

    def positive(self, key: str) -> float:
        value = self.content.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.content.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, options: tuple[str, ...]) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or value not in options:
            raise self.error(key, "one of " + ", ".join(options))
        return value

    def constant(self, key: str, supported: object) -> None:
        """Check a key that may be absent but, if present, has only one value this package implements."""
        if self.content.get(key, supported) != supported:
            raise CheckpointError(
                f"{self.origin}: {key}={self.content[key]!r} is not supported; only {json.dumps(supported)} is. Use a "
                "draft checkpoint trained with DeepSpec's Qwen3 DSpark recipe"
            )


def _check_architecture(d: Mapping[str, Any], origin: str) -> None:
    supported = (
        f"supported: DeepSpec DSpark checkpoints with architectures=[{SUPPORTED_ARCHITECTURE!r}] (drafts for "
        "Qwen3-style targets, with or without Markov and confidence heads)"
    )
    if "speculators_model_type" in d:
        raise CheckpointError(
            f"{origin}: this is a checkpoint in the speculators format (speculators_model_type="
            f"{d['speculators_model_type']!r}), which is not supported; {supported}"
        )
    if "architectures" not in d:
        raise CheckpointError(f"{origin}: key 'architectures' is missing; {supported}")
    if d["architectures"] != [SUPPORTED_ARCHITECTURE]:
        raise CheckpointError(f"{origin}: architectures={d['architectures']!r} is not supported; {supported}")


def _check_layer_types(read: _Reader, num_hidden_layers: int) -> None:
    expected = ["full_attention"] * num_hidden_layers
    if read.content.get("layer_types", expected) != expected:
        raise read.error(
            "layer_types", f"num_hidden_layers={num_hidden_layers} entries, all 'full_attention' (drafts use no other)"
        )


def _rope_theta(read: _Reader) -> float:
    """RoPE base from ``rope_parameters`` (transformers 5) or top-level ``rope_theta`` (transformers 4)."""
    parameters = dict(read.content)
    for key in ("rope_scaling", "rope_parameters"):
        value = read.content.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise read.error(key, "an object or null")
        rope_type = value.get("rope_type", value.get("type", "default"))
        if rope_type != "default" or value.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{read.origin}: {key}={dict(value)!r} is not supported; only the default rotary embedding over the "
                "whole head is. Use a draft trained for a target without RoPE scaling"
            )
        if "rope_theta" in value:
            if read.content.get("rope_theta", value["rope_theta"]) != value["rope_theta"]:
                raise read.error("rope_theta", f"the value in {key}, {value['rope_theta']!r}, or no top-level key")
            parameters["rope_theta"] = value["rope_theta"]
    return _Reader(parameters, read.origin).positive("rope_theta")


def _check(config: DraftConfig) -> None:
    """Rules between keys; single-key rules are in :class:`_Reader`."""

    def fail(key: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{config.origin}: {key}={getattr(config, key)!r} {rule}: {REMEDY}")

    if config.attention_bias:
        raise fail("attention_bias", "is not supported")
    if config.hidden_act != "silu":
        raise fail("hidden_act", "is not supported; only 'silu' is")
    if config.num_attention_heads % config.num_key_value_heads:
        raise fail("num_key_value_heads", f"does not divide num_attention_heads={config.num_attention_heads}")
    if config.head_dim % 2:
        raise fail("head_dim", "is odd, but rotary embeddings need pairs")
    if config.mask_token_id >= config.vocab_size:
        raise fail("mask_token_id", f"is outside the vocabulary of vocab_size={config.vocab_size}")
    taps = config.target_layer_ids
    if any(later <= earlier for earlier, later in pairwise(taps)):
        raise fail("target_layer_ids", "is not strictly increasing")
    if not taps or taps[0] < EMBEDDING_TAP or taps[-1] > config.num_target_layers - 2:
        raise fail(
            "target_layer_ids",
            f"must lie in [-1, {config.num_target_layers - 2}] for num_target_layers={config.num_target_layers} (the "
            "last layer cannot be tapped)",
        )
    if config.markov_rank and config.markov_head_type not in MARKOV_HEAD_TYPES:
        raise fail("markov_head_type", f"must be one of {', '.join(MARKOV_HEAD_TYPES)} because markov_rank is not 0")
    if config.confidence_head_with_markov and not config.enable_confidence_head:
        raise fail("confidence_head_with_markov", "contradicts enable_confidence_head=False")
    if config.confidence_head_with_markov and not config.markov_rank:
        raise fail("confidence_head_with_markov", "needs a Markov head, but markov_rank=0")
