"""Frequencies of the rotary position embedding and the ways in which they are stretched for long contexts.

Every variant here changes only the frequencies, YaRN a factor of the attention's scores as well. Keys are those of
Hugging Face's ``rope_parameters``, and transformers computes what they say.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Literal

from sglang_dspark.declared import Count, Positive, check
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
    """Return the keys that this type reads in addition to the base; those of every type if it is not known."""
    if rope_type in ("default", *_NEEDED):
        return (*_NEEDED.get(rope_type, ()), *_OPTIONS.get(rope_type, ()))
    return ALL_KEYS


def inverse_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None, partial_rotary_factor: float, longest: int
) -> list[float]:
    """Return the angles per position of the ``head_dim / 2`` channel pairs; pairs that do not rotate have 0.

    Args:
        theta: base of the frequencies.
        head_dim: channels of a head; channel i is paired with channel i + head_dim / 2.
        scaling: None for the plain frequencies.
        partial_rotary_factor: share of the pairs that rotate, which are the first ones.
        longest: YaRN's original context length if ``scaling`` gives none.
    """
    rotated = rotary_dim(head_dim, partial_rotary_factor)
    frequencies = [theta ** (-2 * i / rotated) for i in range(rotated // 2)]
    if scaling is not None:
        frequencies, _ = _stretched(theta, head_dim, scaling, partial_rotary_factor, longest)
    return frequencies + [0.0] * (head_dim // 2 - len(frequencies))


def rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """Return the number of channels of a head that rotate."""
    return int(head_dim * partial_rotary_factor)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of the attention's scores: YaRN scales cosines and sines, of queries and keys alike."""
    return 1.0 if scaling is None else _stretched(10_000.0, 8, scaling, 1.0, 1)[1] ** 2


@cache
def _stretched(
    theta: float, head_dim: int, scaling: RopeScaling, partial_rotary_factor: float, longest: int
) -> tuple[list[float], float]:
    """Return the frequencies from transformers, and its factor of cosines and sines, which only ``scaling`` decides."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    keys = {"rope_theta": theta, "partial_rotary_factor": partial_rotary_factor} | scaling.to_dict()
    keys.setdefault("original_max_position_embeddings", longest)
    # What the functions read of a configuration; a real one warns of lengths that are none of its business here.
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters=keys,
        standardize_rope_params=lambda: None,
    )
    with torch.device("cpu"):  # also where a model is made without memory
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config)
    return frequencies.tolist(), float(factor)
