"""What a reader of a format finds, and how it becomes a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_dspark.draft.checked import check
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats.content import Content
from sglang_dspark.draft.formats.recognition import FormatName
from sglang_dspark.draft.formats.tensors import DRAFT_TO_TARGET, TensorRules, rotary_order
from sglang_dspark.draft.rope import rotary_dim
from sglang_dspark.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]
"""Name -> shape of the tensors of a checkpoint."""


@dataclass(frozen=True)
class Reading:
    """A checkpoint's configuration, and how its tensors become the network's.

    Attributes:
        format: of the checkpoint.
        config: canonical.
        rules: for the tensors.
        unknown_keys: of config.json, whose meaning is not known.
    """

    format: FormatName
    config: DraftConfig
    rules: TensorRules
    unknown_keys: tuple[str, ...]


@dataclass
class Found:
    """Values by field of :class:`DraftConfig`, and what else a format says of its tensors.

    Attributes:
        first_layer: number that the format gives to the output of the target's first layer.
        any_tap_order: the taps may be listed in any order, which the columns of ``fc`` follow.
        renamed: names of tensors, see :class:`TensorRules`.
        neighbours, span_head: pairs of RoPE, see :func:`rotary_order`.
    """

    values: dict[str, Any]
    first_layer: int = 0
    any_tap_order: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)
    neighbours: bool = False
    span_head: bool = False


def heads(values: dict[str, Any], shapes: Shapes, rules: TensorRules, defaults: Mapping[str, Any]) -> None:
    """Fill in what the file does not say about the heads: by its tensors, or by the format's defaults without any."""
    stored = {rules.name(name): shape for name, shape in shapes.items() if shape}
    if stored:
        w1, confidence = stored.get("markov_head.markov_w1.weight"), stored.get("confidence_head.proj.weight")
        defaults = {"markov_rank": 0 if w1 is None else w1[-1], "enable_confidence_head": confidence is not None}
        if confidence is not None and isinstance(hidden_size := values.get("hidden_size"), int):
            defaults["confidence_head_with_markov"] = confidence[-1] > hidden_size
        types = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
        defaults["markov_head_type"] = next((kind for kind, name in types.items() if name in stored), "vanilla")
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        if key in defaults:
            values.setdefault(key, defaults[key])
    if values.get("markov_rank") == 0:
        values["markov_head_type"] = None
    if values.get("enable_confidence_head") is False:
        values["confidence_head_with_markov"] = False


def reduced_vocabulary(values: dict[str, Any], shapes: Shapes, default: int | None = None) -> None:
    """Set ``draft_vocab_size``: None where it is the target's."""
    size = values.get("draft_vocab_size")
    if size is None:
        size = next(iter(shapes.get(DRAFT_TO_TARGET, ())), None if shapes else default)
    values["draft_vocab_size"] = None if size == values.get("vocab_size") else size


def own_embedding(content: Content, shapes: Shapes) -> None:
    """Refuse a drafter whose LM head is its own embedding: an LM head that is absent is the target's."""
    tied = content.find("tie_word_embeddings", default=False)
    names = {name.removeprefix("model.") for name in shapes}
    if tied is not False and "embed_tokens.weight" in names and "lm_head.weight" not in names:
        raise content.refuse(
            "tie_word_embeddings", "beside an own embed_tokens.weight is not supported; store lm_head.weight as well"
        )


def finish(name: FormatName, content: Content, found: Found, shapes: Shapes) -> Reading:
    """Put the taps in order and check everything.

    Raises:
        CheckpointError: a key is missing, malformed, contradictory or unsupported.
    """
    values = found.values
    order: tuple[int, ...] = ()
    taps = values.get("target_layer_ids")
    if isinstance(taps, tuple) and all(type(tap) is int for tap in taps):
        indices = sorted(range(len(taps)), key=taps.__getitem__) if found.any_tap_order else list(range(len(taps)))
        values["target_layer_ids"] = tuple(taps[index] - found.first_layer for index in indices)
        order = () if indices == sorted(indices) else tuple(indices)
        _check_columns(content, len(taps), values.get("hidden_size"), shapes)
    known = {f.name for f in fields(DraftConfig)}
    values = {key: value for key, value in values.items() if key in known} | {"origin": content.origin}
    check(DraftConfig, values, origin=content.origin, names=content.names)
    config = DraftConfig(**values)
    rules = TensorRules(
        renamed=found.renamed,
        tap_order=order,
        rotary_order=rotary_order(
            config.head_dim,
            rotary_dim(config.head_dim, config.partial_rotary_factor),
            neighbours=found.neighbours,
            span_head=found.span_head,
        ),
        head_dim=config.head_dim,
    )
    return Reading(name, config, rules, content.unread())


def _check_columns(content: Content, num_taps: int, hidden_size: Any, shapes: Shapes) -> None:
    """A drafter may read a layer that its list of taps does not name: the shape of its projection tells."""
    columns = next((shape[1] for name, shape in shapes.items() if name.endswith("fc.weight") and len(shape) == 2), None)
    if columns is None or type(hidden_size) is not int or columns == num_taps * hidden_size:
        return
    if columns == (num_taps + 1) * hidden_size:
        key = content.names.get("target_layer_ids", "target_layer_ids")
        raise CheckpointError(
            f"{content.origin}: fc.weight reads {num_taps + 1} layers of the target, but {key} names {num_taps}: the "
            "target's last layer is implied, which cannot be tapped. Use another drafter of this target"
        )


def layout_question(content: Content) -> CheckpointError:
    """The file does not say which slots predict."""
    return CheckpointError(
        f"{content.origin}: does the slot of the anchor predict? The file does not say (no key sample_from_anchor), "
        "and both answers are in use. Ask who trained the drafter, write the answer with `python -m sglang_dspark "
        "convert --set sample_from_anchor=true` or `=false`, and serve the result"
    )
