"""Computes ``draft_block`` as its kernels do, in plain torch: the same noise, hence the same tokens up to rounding."""

import torch
from dspark_kernels import DraftBlock, DraftDistribution, MarkovWalk, Purpose, block_confidence_ref, exponential_at


def raced_walk(base_logits, hidden, anchors, heads, rows, keys):
    """Draft like ``draft_block``; distributions by temperature alone."""
    vocabulary, temperatures = heads.vocabulary, rows.draw_temperatures
    is_drawn = temperatures[:, None] > 0
    walk = None if heads.markov is None else MarkovWalk(heads.markov, hidden)
    previous, slots, scores = anchors, [], []
    for k in range(base_logits.shape[1]):
        values = base_logits[:, k].float()
        if walk is not None:
            values = values + walk.latent(previous).float() @ heads.markov.w2.float().T
        scores.append(values / temperatures[:, None].masked_fill(~is_drawn, 1.0))
        noise = keys.race(k, Purpose.DRAFT, values.shape[-1])
        if rows.any_seeded:
            tokens = torch.arange(values.shape[-1], device=values.device)
            tokens = tokens if vocabulary is None else vocabulary.token_ids
            own_noise = exponential_at(rows.seeds[:, None], (keys.positions + k)[:, None], tokens)
            noise = torch.where(rows.is_seeded[:, None], own_noise, noise)
        columns = torch.where(is_drawn, scores[-1] - noise.log(), values.double()).argmax(-1)
        previous = columns if vocabulary is None else vocabulary.token_ids[columns]
        slots.append(previous)
    tokens, distribution = torch.stack(slots, dim=1), None
    if rows.any_sampled:
        stacked = torch.stack(scores, dim=1)
        distribution = DraftDistribution(
            stacked, stacked.logsumexp(-1), None if vocabulary is None else vocabulary.columns
        )
    confidence = None
    if heads.confidence is not None:
        confidence = block_confidence_ref(hidden, anchors, tokens, heads.confidence, heads.w1)
    return DraftBlock(tokens, None, confidence, distribution)
