"""The values that a reader of a format finds, and how they become a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_dspark.declared import check
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import rotation
from sglang_dspark.draft.formats.content import SECTIONS, Content, Remark, Shapes
from sglang_dspark.draft.formats.recognition import FormatName
from sglang_dspark.draft.formats.tensors import DRAFT_TO_TARGET, TensorRules, rotary_order
from sglang_dspark.draft.quantised.storage import Storage
from sglang_dspark.draft.rope import rotary_dim
from sglang_dspark.errors import CheckpointError

_TAPS = {"target_layer_ids": 0, "aux_hidden_state_layer_ids": 1, "eagle_aux_hidden_state_layer_ids": 1}
"""Keys that name taps, and the number of the output of the target's first layer in them."""


@dataclass(frozen=True)
class Reading:
    """A checkpoint's configuration, and how its tensors become the network's.

    Attributes:
        format: of the checkpoint.
        config: canonical.
        rules: for the tensors.
        remarks: on keys of config.json that were not taken at their word.
        unread_keys: of config.json, many of them from a copy of the target's.
        storage: how its tensors are quantised; None if they are not.
    """

    format: FormatName
    config: DraftConfig
    rules: TensorRules
    remarks: tuple[Remark, ...]
    unread_keys: tuple[str, ...]
    storage: Storage | None = None


def heads(content: Content, tensors: Shapes, defaults: Mapping[str, Any]) -> None:
    """Fill in what the file does not say about the heads: by its tensors, or by the format's defaults without any.

    Args:
        tensors: shapes by the network's names.
    """
    values = content.values
    stored = {name: shape for name, shape in tensors.items() if shape}
    if stored:
        w1, confidence = stored.get("markov_head.markov_w1.weight"), stored.get("confidence_head.proj.weight")
        defaults = {"markov_rank": 0 if w1 is None else w1[-1], "enable_confidence_head": confidence is not None}
        if confidence is not None and isinstance(hidden_size := values.get("hidden_size"), int):
            defaults["confidence_head_with_markov"] = confidence[-1] > hidden_size
        types = {"gated": "gate_proj", "rnn": "joint_proj", "selector": "hidden_projection"}
        defaults["markov_head_type"] = next(
            (kind for kind, name in types.items() if f"markov_head.{name}.weight" in stored), "vanilla"
        )
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        if key in defaults:
            values.setdefault(key, defaults[key])
    if values.get("markov_rank") == 0:
        values["markov_head_type"] = None
    if values.get("enable_confidence_head") is False:
        values["confidence_head_with_markov"] = False


def reduced_vocabulary(content: Content, default: int | None = None) -> None:
    """Set ``draft_vocab_size`` by the tensors, or by the format's default without any, if no key says it."""
    values, shapes = content.values, content.shapes
    size = values.get("draft_vocab_size")
    if size is None:
        size = next(iter(shapes.get(DRAFT_TO_TARGET, ())), None if shapes else default)
    values["draft_vocab_size"] = size


def own_embedding(content: Content) -> None:
    """Refuse a drafter whose LM head is its own embedding: an LM head that is absent is the target's."""
    tied = content.find("tie_word_embeddings", default=False)
    names = {name.removeprefix("model.") for name in content.shapes}
    if tied is not False and "embed_tokens.weight" in names and "lm_head.weight" not in names:
        raise content.refuse(
            "tie_word_embeddings", "beside an own embed_tokens.weight is not supported; store lm_head.weight as well"
        )


def finish(name: FormatName, content: Content, rules: TensorRules, *, span_head: bool, first_layer: int = 0) -> Reading:
    """Put the taps in order and check everything.

    Args:
        rules: names of the tensors.
        span_head: see :func:`rotation.rope`.
        first_layer: number that the format gives to the output of the target's first layer.

    Raises:
        CheckpointError: a key is missing, malformed, contradictory or unsupported.
    """
    values, canonical = content.values, name == "DeepSpec"
    taps = values.get("target_layer_ids")
    if isinstance(taps, tuple) and all(type(tap) is int for tap in taps):
        in_order = tuple(range(len(taps)))
        order = in_order if canonical else tuple(sorted(in_order, key=taps.__getitem__))
        values["target_layer_ids"] = tuple(taps[index] - first_layer for index in order)
        rules = replace(rules, tap_order=() if order == in_order else order)
        _check_columns(content, len(taps))
        _compare_taps(content, taps, first_layer)
    if values.get("draft_vocab_size") == values.get("vocab_size"):
        values["draft_vocab_size"] = None  # the whole vocabulary
    values["origin"] = content.origin
    check(DraftConfig, values, origin=content.origin, names=content.names)
    config = DraftConfig(**values)
    channels = rotary_order(
        config.head_dim,
        rotary_dim(config.head_dim, config.partial_rotary_factor),
        neighbours=rotation.pairs_are_neighbours(content),
        span_head=span_head,
    )
    rules = replace(rules, rotary_order=channels, head_dim=config.head_dim)
    return Reading(name, config, rules, tuple(content.remarks), content.unread())


def _compare_taps(content: Content, taps: tuple[int, ...], first_layer: int) -> None:
    """Note keys beside the format's own that name other taps."""
    own = content.names["target_layer_ids"]
    for key, first in _TAPS.items():
        for section in ("", *(f"{section}." for section in SECTIONS)):
            listed = content.find(section + key)
            if section + key == own or listed is None:
                continue
            if listed != [tap - first_layer + first for tap in taps]:
                words = (
                    f"is ignored, though it names other layers than {own}={list(taps)}: the output of the first layer "
                    f"has the number {first} here, and {first_layer} there. Ask who trained the drafter"
                )
                content.remark(section + key, listed, words, doubtful=True)


def _check_columns(content: Content, num_taps: int) -> None:
    """Refuse a drafter that reads a layer which its list of taps does not name, by the shape of its projection."""
    hidden_size, shapes = content.values.get("hidden_size"), content.shapes.items()
    columns = next((shape[1] for name, shape in shapes if name.endswith("fc.weight") and len(shape) == 2), None)
    if type(hidden_size) is int and columns == (num_taps + 1) * hidden_size:
        key = content.names.get("target_layer_ids", "target_layer_ids")
        raise CheckpointError(
            f"{content.origin}: fc.weight reads {num_taps + 1} layers of the target, but {key} names {num_taps}: the "
            "target's last layer is implied, which cannot be tapped. Use another drafter of this target"
        )


def layout_question(content: Content) -> CheckpointError:
    """Return the error of a file that does not say which slots predict."""
    return CheckpointError(
        f"{content.origin}: does the slot of the anchor predict? The file does not say (no key sample_from_anchor), "
        "and both answers are in use. Ask who trained the drafter, and add the answer to the file"
    )
