"""Random numbers that are computed from a key, on the host and inside Triton kernels.

A value depends on its key only, never on batch order, batch size or device.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Two families of
values are drawn from it:

====================  ==================  ===================================================================
family                Philox key          counter words
====================  ==================  ===================================================================
``uniform``           engine seed         slot | purpose << 16 | step[32:40] << 24, step[:32], request key (2)
``exponential``       request's own seed  SEEDED << 16, position, token id // 2, 0
====================  ==================  ===================================================================

The purpose bits of the first word keep them apart.

A request appears at most once per engine step, so (step, request key) names one decode round of one request, and no
counter is ever used twice. That is what keeps sampling exact under a lagged verify budget: a draft that was not
verified must be drawn again from fresh noise, because last round's confidences have already revealed the old one.

Words are 32-bit values held in int64 tensors: torch has no full set of uint32 operators on every device.

Inside Triton kernels ``seed`` is the engine seed as a signed 64-bit integer, ``step`` and ``key`` are int64 scalars on
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import cast

import torch
import triton
import triton.language as tl

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Word = torch.Tensor | int
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Purpose(IntEnum):
    """The decision that a random number is for; part of its key."""

    DRAFT = 0  # which token the drafter proposes in a slot
    ACCEPT = 1  # whether the target keeps it
    RESIDUAL = 2  # the correction after a rejection
    BONUS = 3  # the token after a fully accepted block, or a plain decode step
    SEEDED = 4  # exponential noise of requests that bring their own seed
    SIMULATED = 5  # whether a draft is kept that no target judges


def signed64(value: int) -> int:
    """Return the low 64 bits of ``value`` as a signed integer, which int64 tensors and kernels hold."""
    return (value + 2**63) % 2**64 - 2**63


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> Words:
    """Apply the ten Philox rounds.

    Args:
        counter: four 32-bit words, int64 tensors or ints that broadcast against each other; at least one word of the
            counter or the key must be a tensor.
        key: two 32-bit words, likewise.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The low 64 bits of a product are right even where int64 overflows, and the mask removes the sign of its shift.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> 32 ^ c1 ^ k0) & _MASK32, (first >> 32 ^ c3 ^ k1) & _MASK32
        c1, c3 = second & _MASK32, first & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return cast(Words, (c0, c1, c2, c3))


def uniform(
    seed: int,
    step: Word,
    request_keys: torch.Tensor,
    slots: Word,
    purpose: Word,
) -> torch.Tensor:
    """Return uniform float64 values in [0, 1), 53 random bits each.

    Args:
        seed: engine seed; its low 64 bits are used.
        step: engine step below 2**40, an int or a 0-dim int64 tensor.
        request_keys: int64, any shape; distinct for the requests of one step. All 64 bits count.
        slots: position within the block, below 2**16; broadcasts against ``request_keys``.
        purpose: a ``Purpose``, or an int64 tensor of them that broadcasts.

    Returns:
        float64 tensor of the broadcast shape. No host sync.
    """
    counter = (
        slots | (purpose << 16) | (((step >> 32) & 0xFF) << 24),
        step & _MASK32,
        request_keys & _MASK32,
        (request_keys >> 32) & _MASK32,
    )
    high, low, _, _ = philox4x32(counter, _split64(seed))
    return _join_bits(high, low, 53).to(torch.float64) * 2.0**-53


def exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return unit-rate exponential noise E for requests with their own seed.

    ``argmax(p / E)`` is distributed as p and equals ``argmax(log p + g)`` with the Gumbel noise ``g = -log E``, at half
    the logarithms.

    Args:
        seeds: [n] int64, the requests' seeds.
        positions: [n] int64, absolute position of the token to be drawn, below 2**32.
        vocab_size: V.

    Returns:
        [n, V] float64, strictly positive. The value for (seed, position, token id) does not depend on V.
    """
    pairs = torch.arange((vocab_size + 1) // 2, device=seeds.device)
    even, odd = _token_bits(seeds[:, None], positions[:, None], pairs)
    return _to_exponential(torch.stack((even, odd), dim=-1).flatten(1)[:, :vocab_size])


def exponential_at(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the noise of ``exponential`` for single tokens.

    Takes three int64 tensors that broadcast, and returns float64 of their common shape.
    """
    even, odd = _token_bits(seeds, positions, token_ids >> 1)
    return _to_exponential(torch.where(token_ids & 1 == 0, even, odd))


@dataclass(frozen=True)
class RoundKeys:
    """Everything that keys the random numbers of one decode round of a batch.

    Attributes:
        seed: engine seed, 64 bits.
        step: engine step, int or 0-dim int64 tensor; never repeated during the engine's life.
        request_keys: [bs] int64, distinct within the step.
        positions: [bs] int64, absolute position of the first token this round draws (the anchor's position + 1);
            only requests with a seed have it read.
    """

    seed: int
    step: int | torch.Tensor
    request_keys: torch.Tensor
    positions: torch.Tensor

    @property
    def signed_seed(self) -> int:
        """Return the seed as kernels take it: the signed integer of its low 64 bits."""
        return signed64(self.seed)

    @property
    def device_step(self) -> torch.Tensor:
        """Return the step as a 0-dim int64 tensor: of an int by a fill, because a copy from the host would wait."""
        if isinstance(self.step, torch.Tensor):
            return self.step
        return torch.full((), self.step, dtype=torch.int64, device=self.request_keys.device)

    def uniform(self, slots: Word, purpose: Word) -> torch.Tensor:
        """Return uniforms for one slot per request (``slots`` int or [bs]): [bs] float64; see ``uniform``."""
        return uniform(self.seed, self.step, self.request_keys, slots, purpose)

    def block_uniform(self, num_slots: int, purpose: Purpose) -> torch.Tensor:
        """Return uniforms for slots 0..num_slots-1 of every request: [bs, num_slots] float64."""
        slots = torch.arange(num_slots, device=self.request_keys.device)
        return uniform(self.seed, self.step, self.request_keys[:, None], slots, purpose)

    def kept(self, draft_mass: torch.Tensor, target_mass: torch.Tensor) -> torch.Tensor:
        """Return whether each draft is kept, [bs, gamma] bool: u < min(1, p_t / p_d), multiplied out.

        u < 1 makes the minimum implicit.

        Args:
            draft_mass, target_mass: [bs, gamma] float64, p_d and p_t of the drafts.
        """
        return self.block_uniform(draft_mass.shape[1], Purpose.ACCEPT) * draft_mass < target_mass

    def drawn(self, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Return a token [n] int64 for each of this round's random numbers [n], drawn with the weights [n, V]."""
        return inverse_cdf(weights, uniforms)

    def take(self, index: torch.Tensor) -> RoundKeys:
        """Return the keys of the requests ``index`` [m] int64."""
        return replace(self, request_keys=self.request_keys[index], positions=self.positions[index])


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative weight exceeds ``uniforms`` times the total.

    Args:
        weights: [n, V] float32 >= 0 with a positive sum; need not be normalised.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64; a token of weight 0 is never returned.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # u <= 1 - 2**-53 takes at least half a unit in the last place off the total, so the product rounds below it. Only
    # NaN weights find no token; the bound keeps them from becoming an id that no embedding has.
    threshold = uniforms * cumulative[:, -1]
    found = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    return found.clamp_max_(weights.shape[-1] - 1)


def _split64(value: Word) -> tuple[Word, Word]:
    return value & _MASK32, (value >> 32) & _MASK32


def _join_bits(high: torch.Tensor, low: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the top bits of two words as one integer of ``num_bits`` (52 or 53) bits."""
    return ((high >> (58 - num_bits)) << 26) | (low >> 6)


def _token_bits(seeds: torch.Tensor, positions: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """52 random bits each for the tokens 2 * pair and 2 * pair + 1."""
    words = philox4x32((Purpose.SEEDED << 16, positions & _MASK32, pairs, 0), _split64(seeds))
    return _join_bits(*words[:2], 52), _join_bits(*words[2:], 52)


def _to_exponential(bits: torch.Tensor) -> torch.Tensor:
    # Odd multiples of 2**-53 are exact in float64 and exclude both 0 and 1, so E is finite and positive.
    return bits.to(torch.float64).mul_(2.0**-52).add_(2.0**-53).log_().neg_()


_SEEDED_WORD = tl.constexpr(int(Purpose.SEEDED) << 16)
_UNIT_26 = tl.constexpr(2.0**-26)
_UNIT_52 = tl.constexpr(2.0**-52)
_BITS_26 = tl.constexpr((1 << 26) - 1)
_UNIT_53 = tl.constexpr(2.0**-53)


@triton.jit
def uniforms(seed, step, key, slots, purpose) -> tl.tensor:
    """Return ``noise.uniform``: float64 shaped as ``slots``, of one request (``key`` a scalar) or one for each slot."""
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
    """Return E = -log(x), x = (bits + 0.5) * 2**-52, of the top 26 bits of two words: float32, relative error <1e-6."""
    high = high >> 6
    low = low >> 6
    return _minus_log(_unit_52(high ^ _BITS_26, low ^ _BITS_26), _unit_52(high, low))


@triton.jit
def seeded_noise(seed, position, pairs) -> tl.tensor:
    """Return ``noise.exponential`` [2 * P] of tokens 2 * pairs, 2 * pairs + 1 (``pairs`` int32 [P]): the same words.

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
    """Return ``noise.exponential_at``, as precise as :func:`seeded_noise`: one generator call per value.

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
