"""Frequencies of the rotary position embedding and the ways in which they are stretched for long contexts.

Every variant here changes the frequencies alone, YaRN a factor of the attention's scores as well. Formulas and keys are
those of Hugging Face's ``rope_parameters``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from sglang_dspark.draft.checked import Count, Positive, check
from sglang_dspark.errors import CheckpointError

_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_OPTIONS = {
    "yarn": tuple(
        "original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate".split()
    ),
    "proportional": ("factor",),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The stretching of the frequencies; a key that the type does not use is None.

    ``factor`` is the ratio of the new context length to ``original_max_position_embeddings``, the one of the training.
    ``attention_factor``, ``mscale`` and ``mscale_all_dim`` say what YaRN multiplies the attention's scores with.
    ``proportional`` is Gemma 4's: the pairs that rotate do so as they would if all of the head did.
    """

    rope_type: Literal["linear", "llama3", "yarn", "proportional"]
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    origin: str = field(default="RopeScaling", compare=False, repr=False)

    def __post_init__(self) -> None:
        check(RopeScaling, vars(self), origin=self.origin)
        for key in _NEEDED[self.rope_type]:
            if getattr(self, key) is None:
                raise CheckpointError(f"{self.origin}: rope_type={self.rope_type!r} needs the key {key!r}")
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            raise CheckpointError(
                f"{self.origin}: low_freq_factor={self.low_freq_factor} is not below high_freq_factor="
                f"{self.high_freq_factor}"
            )

    def to_dict(self) -> dict[str, object]:
        """Return the keys that are set."""
        return {key: value for key, value in vars(self).items() if value is not None and key != "origin"}


ALL_KEYS = tuple(field.name for field in fields(RopeScaling) if field.name not in ("rope_type", "origin"))
"""Keys that one of the types reads."""


def keys_of(rope_type: str) -> tuple[str, ...]:
    """Return the keys that this type reads beside the base; those of every type if it is not known."""
    if rope_type in ("default", *_NEEDED):
        return (*_NEEDED.get(rope_type, ()), *_OPTIONS.get(rope_type, ()))
    return ALL_KEYS


def inverse_frequencies(
    theta: float,
    head_dim: int,
    *,
    scaling: RopeScaling | None = None,
    partial_rotary_factor: float = 1.0,
    max_position_embeddings: int | None = None,
) -> list[float]:
    """Return the angles per position of the ``head_dim / 2`` channel pairs; pairs that do not rotate have 0.

    Args:
        theta: base of the frequencies.
        head_dim: channels of a head; channel i is paired with channel i + head_dim / 2.
        scaling: None for the plain frequencies.
        partial_rotary_factor: share of the pairs that rotate, which are the first ones.
        max_position_embeddings: YaRN's original context length if ``scaling`` gives none.
    """
    rotated = rotary_dim(head_dim, partial_rotary_factor)
    spread = head_dim if scaling is not None and scaling.rope_type == "proportional" else rotated
    plain = [theta ** (-2 * i / spread) for i in range(rotated // 2)]
    if scaling is None:
        stretched = plain
    elif scaling.rope_type in ("linear", "proportional"):
        stretched = [frequency / (scaling.factor or 1.0) for frequency in plain]
    elif scaling.rope_type == "llama3":
        stretched = [_llama3(frequency, scaling) for frequency in plain]
    else:
        stretched = _yarn(plain, theta, rotated, scaling, max_position_embeddings)
    return stretched + [0.0] * (head_dim // 2 - rotated // 2)


def rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """Return the number of channels of a head that rotate."""
    return int(head_dim * partial_rotary_factor)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of the attention's scores: YaRN scales cosines and sines, of queries and keys alike."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor**2
    factor = _given(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (_yarn_mscale(factor, scaling.mscale) / _yarn_mscale(factor, scaling.mscale_all_dim)) ** 2
    return _yarn_mscale(factor, 1.0) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(
    plain: list[float], theta: float, rotated: int, scaling: RopeScaling, max_position_embeddings: int | None
) -> list[float]:
    """Fast pairs as they are, slow ones slowed down by the factor, those between them blended."""
    factor = _given(scaling.factor)
    length = _given(scaling.original_max_position_embeddings or max_position_embeddings)

    def pair_of(rotations: float) -> float:
        """Index, not whole, of the pair that turns so often within the original length."""
        return rotated * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast or 32.0), pair_of(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = (high - low) or 0.001
    blended = []
    for pair, frequency in enumerate(plain):
        slowed = min(max((pair - low) / width, 0.0), 1.0)
        blended.append(frequency * (1 - slowed) + frequency / factor * slowed)
    return blended


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Long wavelengths are stretched by the factor, short ones stay, those between are blended."""
    length = _given(scaling.original_max_position_embeddings)
    low, high = _given(scaling.low_freq_factor), _given(scaling.high_freq_factor)
    rotations = length * frequency / (2 * math.pi)
    kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
    return frequency * kept + frequency / _given(scaling.factor) * (1 - kept)


def _given(value: float | None) -> float:
    assert value is not None, "checked when the scaling was read"
    return value
