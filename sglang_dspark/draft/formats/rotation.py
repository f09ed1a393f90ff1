"""Keys of the rotary embedding: at the top, in ``rope_parameters`` (transformers 5), in ``rope_scaling`` (4)."""

from collections.abc import Mapping
from typing import Any

from sglang_dspark.declared import REMEDY
from sglang_dspark.draft.config import FULL, SLIDING
from sglang_dspark.draft.formats.content import Content
from sglang_dspark.draft.rope import ALL_KEYS, RopeScaling, keys_of
from sglang_dspark.errors import CheckpointError

WHOLE_HEAD, LEADING = "whole_head", "leading"
"""Values of ``rotary_pairs``: if a part of the pairs rotates, channel i is paired with i + head_dim / 2, as it is done
here, or the first channels are paired up among each other, as Hugging Face's ``partial_rotary_factor`` has it."""

PART_OF_HEAD = ("partial_rotary_factor", "rotary_dim", "rotary_pct")
"""Keys beside the layers or among those of RoPE, also in files that say nothing about parts of a head otherwise.

Trainers rotate whole heads; a part that is meant has ``rotary_pairs`` beside it."""
LEFT_OVER = (
    "mrope_section mrope_interleaved llama_4_scaling_beta apply_yarn_scaling finetuned long_factor short_factor "
    "long_mscale short_mscale"
).split()
"""Keys among those of RoPE that drafters have from a copy of their target's configuration, and no trainer reads."""
_REASON = "it is a copy of the target's, and no trainer reads it"
_READ = ("rope_theta", "rope_type", "type", "rotary_pairs", "rope_dim", *PART_OF_HEAD)


def rope(content: Content, kind: str | None = None) -> bool:
    """Read the rotary embedding.

    Args:
        kind: of attention, whose set counts if ``rope_parameters`` has one per kind; None takes the kinds that occur.

    Returns:
        Whether a part of the pairs leaves out the last ones of the whole head, see :data:`WHOLE_HEAD`.
    """
    keys = _RopeKeys(content, kind)
    theta = keys.agreed("rope_theta")
    if theta is not None:
        content.values["rope_theta"] = theta
    types = {str(keys.inner[key]) for key in ("rope_type", "type") if key in keys.inner}
    if len(types) > 1:
        raise CheckpointError(f"{content.origin}: rope_parameters has two types, {sorted(types)}: {REMEDY}")
    rope_type = next(iter(types), "default")
    if rope_type == "dynamic":
        place, rope_type = keys.places.get("rope_type") or keys.places["type"], "default"
        content.remark(place, "dynamic", "is read as plain RoPE, which it is up to max_position_embeddings")
    given = _of_type(content, keys, rope_type, said=bool(types))
    if rope_type != "default":
        origin = f"{content.origin}: rope_parameters"
        scaling = RopeScaling(rope_type=rope_type, origin=origin, **given)  # type: ignore[arg-type]  # it checks
        content.values["rope_scaling"] = scaling
    return _read_part(content, keys, spans_head=rope_type == "proportional")


def pairs_are_neighbours(content: Content) -> bool:
    """Return whether RoPE turns channels 2i and 2i + 1 of a head, not i and i + hd / 2."""
    sections = dict.fromkeys((content.section, "", "dflash_config."))
    names = [section + key for key in ("rope_is_neox_style", "is_neox_style") for section in sections]
    return content.find(*names) is False


class _RopeKeys:
    """The keys of RoPE that are set, wherever they are.

    Attributes:
        inner: those of ``rope_parameters`` and ``rope_scaling``.
        places: of those, the key with the objects that lead to it.
    """

    def __init__(self, content: Content, kind: str | None) -> None:
        self.content, self.inner, self.places = content, dict[str, Any](), dict[str, str]()
        occurring = {FULL, SLIDING} & {*map(str, content.values.get("layer_types", ()))} or {FULL}
        for key in (content.section + "rope_parameters", content.section + "rope_scaling"):
            parameters = content.find(key)
            if parameters is None:
                continue
            if not isinstance(parameters, Mapping):
                raise content.refuse(key, "should be an object or null")
            for place, name, value in _of_kind(content, key, parameters, {kind} if kind else occurring):
                if self.inner.setdefault(name, value) != value and name not in (*PART_OF_HEAD, *LEFT_OVER):
                    raise content.refuse(key, f"contradicts {name}={self.inner[name]!r} in rope_parameters")
                self.places.setdefault(name, place)

    def everywhere(self, name: str) -> dict[str, Any]:
        """Return the values of one key by its places, inner ones first."""
        top = self.content.section + name
        found = {self.places[name]: self.inner[name]} if name in self.inner else {}
        return found if (value := self.content.find(top)) is None else found | {top: value}

    def agreed(self, name: str) -> Any:
        """Return the value of one key; None if it is not set.

        Raises:
            CheckpointError: two places contradict each other.
        """
        found = self.everywhere(name)
        top = self.content.names[name] = self.content.section + name
        value = next(iter(found.values()), None)
        if found.get(top, value) != value:
            raise self.content.refuse(top, f"contradicts {value!r} beside the other keys of RoPE")
        return value


def _of_kind(content: Content, key: str, parameters: Mapping[str, Any], kinds: set[str]) -> list[tuple[str, str, Any]]:
    """Return place, name and value of the parameters themselves, or of those of one kind of attention."""
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
    chosen, place = parameters, key
    if nested:
        sets = [nested[kind] for kind in sorted(kinds) if kind in nested]
        if len(sets) < len(kinds) or any(other != sets[0] for other in sets):
            raise content.refuse(
                key,
                f"is not one set for the layers of kind {', '.join(sorted(kinds))}; layers that differ in RoPE are not "
                "supported",
            )
        chosen, place = sets[0], f"{key}.{min(kinds)}"
        for kind in sorted(nested.keys() - kinds):
            if nested[kind] != chosen:
                content.remark(f"{key}.{kind}", nested[kind], f"is ignored: the drafter's layers have that of {place}")
    # Text has equal positions in all sections of mrope.
    return [
        (f"{place}.{name}", name, "default" if value == "mrope" else value)
        for name, value in chosen.items()
        if value is not None
    ]


def _of_type(content: Content, keys: _RopeKeys, rope_type: str, *, said: bool) -> dict[str, Any]:
    """Return the keys that the type reads, and note the others.

    Args:
        said: there is a key that names the type.
    """
    used, unknown = keys_of(rope_type), []
    for name, value in keys.inner.items():
        if name in used or name in _READ:
            continue
        if name in ALL_KEYS and said:
            content.remark(keys.places[name], value, f"is ignored: rope_type={rope_type!r} does not read it")
        elif name in ALL_KEYS:
            words = "is ignored, which may be wrong: no rope_type says what it is for. Ask who trained the drafter"
            content.remark(keys.places[name], value, words, doubtful=True)
        elif name in LEFT_OVER and value:
            content.remark(keys.places[name], value, f"is ignored: {_REASON}")
        elif name not in LEFT_OVER:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{content.origin}: rope_parameters={keys.inner!r} has unknown keys {sorted(unknown)}: {REMEDY}"
        )
    given = {name: keys.inner[name] for name in used if name in keys.inner}
    original = "original_max_position_embeddings"  # some targets have it beside the layers
    if original in used:
        given |= {} if (length := keys.agreed(original)) is None else {original: length}
    else:
        content.ignore(content.section + original, f"rope_type={rope_type!r} does not read it")
    return given


def _read_part(content: Content, keys: _RopeKeys, *, spans_head: bool) -> bool:
    """Read which part of a head rotates: the whole one, unless the file says that a part is meant.

    Args:
        spans_head: the type of RoPE itself pairs the halves of the head, and means a part.
    """
    pairs, channels = keys.agreed("rotary_pairs"), keys.inner.get("rope_dim")
    share, head_dim = "partial_rotary_factor", content.values.get("head_dim")
    served = (WHOLE_HEAD,) if spans_head else (WHOLE_HEAD, LEADING)
    if pairs not in (None, *served):
        raise CheckpointError(
            f"{content.origin}: rotary_pairs={pairs!r} should be {' or '.join(map(repr, served))}: {REMEDY}"
        )
    if spans_head:
        pairs = WHOLE_HEAD
    if channels is not None:  # SGLang's key for what was trained
        if type(channels) is not int or type(head_dim) is not int or not 0 < channels <= head_dim:
            raise CheckpointError(
                f"{content.origin}: rope_dim={channels!r} should be at most head_dim={head_dim}: {REMEDY}"
            )
        content.values[share] = channels / head_dim
    elif pairs is not None:
        if (value := keys.agreed(share)) is not None:
            content.values[share] = value
        return bool(pairs == WHOLE_HEAD)
    for key in PART_OF_HEAD:
        for place, value in keys.everywhere(key).items():
            if value not in (1, head_dim):
                content.remark(place, value, f"is ignored: {_REASON}")
    return False
