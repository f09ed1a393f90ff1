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


def seeded_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the draw of a seeded request: argmax(log p + g(seed, position)) with Gumbel noise g.

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
    """Scores p / E [n, V] float64, with noise for the possible tokens alone if the host sees that they are few."""
    if not reads_are_free(probs):
        return probs / exponential(seeds, positions, probs.shape[-1])
    row, token = probs.nonzero(as_tuple=True)
    if row.shape[0] > probs.numel() // _DENSE_SHARE:
        return probs / exponential(seeds, positions, probs.shape[-1])
    scores = torch.zeros_like(probs, dtype=torch.float64)
    scores[row, token] = probs[row, token] / exponential_at(seeds[row], positions[row], token)
    return scores


def draw(logits: torch.Tensor, rows: SamplingBatch, keys: RoundKeys) -> torch.Tensor:
    """One token per request by its own rule: the first after the prompt, or a decode step without drafts.

    Args:
        logits: [bs, V], any float dtype, not modified.
        rows: parameters of the bs requests.
        keys: noise keys of this step; ``positions`` is that of the token to be drawn.

    Returns:
        [bs] int64.
    """
    tokens = logits.argmax(-1) if rows.any_greedy else keys.positions.new_empty(len(rows))
    if rows.any_sampled:
        index = rows.sampled_index
        probs = target_probs(rows.select(logits, index), rows.sampled_params)
        tokens[index] = keys.drawn(probs, rows.select(keys.uniform(0, Purpose.BONUS), index))
    if rows.any_seeded:
        index = rows.seeded_index
        probs = target_probs(rows.select(logits, index), rows.seeded_params)
        tokens[index] = seeded_argmax(probs, rows.seeds[index], keys.positions[index])
    return tokens
