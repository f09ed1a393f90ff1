"""Drawing one token per row from explicit probabilities."""

import torch

from dspark_kernels.sampling.noise import Purpose, RoundKeys, exponential, exponential_at
from dspark_kernels.sampling.parameters import SamplingBatch
from dspark_kernels.sampling.target_distribution import reads_are_free, target_probs

# Values of noise that the CPU draws at once, so that the generator's words stay in cache: 16 rows of 49152 took 4.5 ms
# each in one piece and 2.4 ms row by row.
_NOISE_BLOCK = 65536
# Elsewhere: whole rows would take 56 bytes per row and token, memory that was not reserved.
_DEVICE_NOISE_BLOCK = 1 << 22
# Noise for single tokens costs twice the dense kind per token, and gathering them as much again.
_DENSE_SHARE = 4


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds ``uniforms`` times the total.

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


def seeded_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The draw of a seeded request: argmax(log p + g(seed, position)) with Gumbel noise g.

    It depends on nothing but the seed, the position and p, so it repeats whatever was drafted.

    Args:
        probs: [n, V] float32.
        seeds: [n] int64.
        positions: [n] int64, absolute position of the token to be drawn.

    Returns:
        [n] int64; a token of probability 0 is never returned.
    """
    rows = max(1, (_NOISE_BLOCK if reads_are_free(probs) else _DEVICE_NOISE_BLOCK) // probs.shape[-1])
    blocks = zip(*(torch.split(values, rows) for values in (probs, seeds, positions)), strict=True)
    return torch.cat([_seeded_scores(*block).argmax(-1) for block in blocks])


def _seeded_scores(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores p / E [n, V] float64, with noise for the possible tokens alone where the host sees that they are few."""
    if not reads_are_free(probs):
        return probs / exponential(seeds, positions, probs.shape[-1])
    row, token = probs.nonzero(as_tuple=True)
    if row.shape[0] > probs.numel() // _DENSE_SHARE:
        return probs / exponential(seeds, positions, probs.shape[-1])
    scores = torch.zeros_like(probs, dtype=torch.float64)
    scores[row, token] = probs[row, token] / exponential_at(seeds[row], positions[row], token)
    return scores


def draw_by_rule(
    logits: torch.Tensor,
    rows: SamplingBatch,
    uniforms: torch.Tensor | None,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One token per request, each by its own rule: argmax, inverse CDF or seeded argmax.

    Args:
        logits: [bs, V], any float dtype, not modified.
        rows: parameters of the bs requests.
        uniforms: [bs] float64, read for sampled requests only; None exactly when there are none.
        positions: [bs] int64, absolute position of the token to be drawn.

    Returns:
        Tokens [bs] int64, and the distributions [num_sampled, V] float32 that the sampled requests were drawn from, in
        the order of ``rows.sampled_index``; None without sampled requests.
    """
    tokens = logits.argmax(-1) if rows.any_greedy else positions.new_empty(len(rows))
    sampled_probs = None
    if uniforms is not None:
        index = rows.sampled_index
        sampled_probs = target_probs(rows.select(logits, index), rows.sampled_params)
        tokens[index] = inverse_cdf(sampled_probs, rows.select(uniforms, index))
    if rows.any_seeded:
        index = rows.seeded_index
        probs = target_probs(rows.select(logits, index), rows.seeded_params)
        tokens[index] = seeded_argmax(probs, rows.seeds[index], positions[index])
    return tokens, sampled_probs


def draw(logits: torch.Tensor, rows: SamplingBatch, keys: RoundKeys) -> torch.Tensor:
    """One token per request: the first after the prompt, or a decode step without drafts.

    Args:
        logits: [bs, V], any float dtype, not modified.
        rows: parameters of the bs requests.
        keys: noise keys of this step; ``positions`` is that of the token to be drawn.

    Returns:
        [bs] int64.
    """
    uniforms = keys.uniform(0, Purpose.BONUS) if rows.any_sampled else None
    return draw_by_rule(logits, rows, uniforms, keys.positions)[0]
