"""The random numbers of ``noise.py`` inside Triton kernels.

``seed`` is the engine seed as a signed 64-bit integer, ``step`` and ``key`` are int64 scalars on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.sampling.noise import Purpose

_SEEDED_WORD = tl.constexpr(int(Purpose.SEEDED) << 16)
_UNIT_26 = tl.constexpr(2.0**-26)
_UNIT_52 = tl.constexpr(2.0**-52)
_BITS_26 = tl.constexpr((1 << 26) - 1)
_UNIT_53 = tl.constexpr(2.0**-53)


@triton.jit
def uniforms(seed, step, key, slots, purpose) -> tl.tensor:
    """``noise.uniform``: float64 of the shape of ``slots``, of one request (``key`` a scalar) or one for each slot."""
    zeros = (slots * 0).to(tl.uint32)
    high, low, _third, _fourth = tl.philox(
        seed,
        (slots.to(tl.int64) | (purpose << 16) | (((step >> 32) & 0xFF) << 24)).to(tl.uint32),
        zeros + step.to(tl.uint32),
        zeros + key.to(tl.uint32),
        zeros + (key >> 32).to(tl.uint32),
    )
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * _UNIT_53


@triton.jit
def _minus_log(x, rest) -> tl.tensor:
    """-log(rest) of ``rest`` = 1 - ``x`` in (0, 1), each given to float32's relative precision."""
    # Races are won by small values, which the rounding of 1 - x would blur: there it is 2 artanh(x / (2 - x)).
    s = x / (2.0 - x)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9)))))
    return tl.where(x < 0.25, series, -tl.log(rest))


@triton.jit
def _unit_52(high, low) -> tl.tensor:
    """(26 bits of high, 26 bits of low, 1/2) * 2**-52 in float32, precise however small it is."""
    return high.to(tl.float32) * _UNIT_26 + (low.to(tl.float32) + 0.5) * _UNIT_52


@triton.jit
def unit_exponential_52(high, low) -> tl.tensor:
    """E = -log(x), x = (bits + 0.5) * 2**-52 with the top 26 bits of two words: float32, relative error below 1e-6."""
    high = high >> 6
    low = low >> 6
    return _minus_log(_unit_52(high ^ _BITS_26, low ^ _BITS_26), _unit_52(high, low))


@triton.jit
def seeded_noise(seed, position, pairs) -> tl.tensor:
    """``noise.exponential`` [2 * P] of the tokens 2 * pairs, 2 * pairs + 1 (``pairs`` int32 [P]): the same words.

    All 52 bits count, but E is float32 with a relative error below 1e-6 and not float64: float32 is as much as the
    reference has of the probabilities that E is held against, and float64 logarithms are slow on most GPUs.
    """
    zeros = (pairs * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed,
        zeros + _SEEDED_WORD,
        zeros + position.to(tl.uint32),
        pairs.to(tl.uint32),
        zeros,
    )
    return tl.interleave(unit_exponential_52(w0, w1), unit_exponential_52(w2, w3))


@triton.jit
def seeded_noise_at(seeds, positions, tokens) -> tl.tensor:
    """``noise.exponential_at``, as precise as :func:`seeded_noise`: one generator call per value.

    ``seeds`` and ``positions`` [B, 1] int64 of several requests with ``tokens`` [1, T] int32 give [B, T].
    """
    zeros = (tokens * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seeds,
        zeros + _SEEDED_WORD,
        zeros + positions.to(tl.uint32),
        (tokens >> 1).to(tl.uint32),
        zeros,
    )
    is_even = (tokens & 1) == 0
    return unit_exponential_52(tl.where(is_even, w0, w2), tl.where(is_even, w1, w3))
