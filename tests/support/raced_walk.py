"""Computes ``draft_block`` as its kernels do, in plain torch: the same noise, hence the same tokens up to rounding."""

import torch
from dspark_kernels import (
    DraftBlock,
    DraftDistribution,
    Int8Weight,
    MarkovWalk,
    Purpose,
    block_confidence_ref,
    exponential_at,
)
from dspark_kernels.drafting.candidates import OUTRIGHT


def raced_walk(base_logits, hidden, anchors, heads, rows, keys, candidates=None):
    """Draft like ``draft_block``; distributions by temperature alone."""
    vocabulary, temperatures = heads.vocabulary, rows.draw_temperatures
    is_drawn = temperatures[:, None] > 0
    walk = None if heads.markov is None else MarkovWalk(heads.markov, hidden)
    previous, slots, scores = anchors, [], []
    listed = None if heads.shortlist is None else shortlist(base_logits, heads, candidates)
    for k in range(base_logits.shape[1]):
        values = base_logits[:, k].float()
        if walk is not None:
            values = values + walk.latent(previous).float() @ w2_of(heads).T
        if listed is not None:
            values = values.where(listed[:, k], float("-inf"))
        scores.append(values / temperatures[:, None].masked_fill(~is_drawn, 1.0))
        outright = torch.zeros_like(anchors) > 0
        if candidates is not None:
            scores[-1], outright = raised(scores[-1], candidates, k, vocabulary)
        noise = keys.race(k, Purpose.DRAFT, values.shape[-1])
        if rows.any_seeded:
            tokens = torch.arange(values.shape[-1], device=values.device)
            tokens = tokens if vocabulary is None else vocabulary.token_ids
            own_noise = exponential_at(rows.seeds[:, None], (keys.positions + k)[:, None], tokens)
            noise = torch.where(rows.is_seeded[:, None], own_noise, noise)
        columns = torch.where(is_drawn, scores[-1] - noise.log(), scores[-1].double()).argmax(-1)
        previous = columns if vocabulary is None else vocabulary.token_ids[columns]
        if candidates is not None:
            previous = torch.where(outright, candidates.chains[:, 2 + k], previous)
            candidates.chains[:, 1] += (candidates.chains[:, 1] == k) & (previous == candidates.chains[:, 2 + k])
        slots.append(previous)
    tokens, distribution = torch.stack(slots, dim=1), None
    if rows.any_sampled:
        stacked = torch.stack(scores, dim=1)
        distribution = DraftDistribution(
            stacked, stacked.logsumexp(-1), None if vocabulary is None else vocabulary.columns
        )
    confidence = None
    if heads.confidence is not None:
        confidence = block_confidence_ref(hidden, anchors, tokens, heads.confidence, heads.w1, candidates)
    elif listed is not None:
        confidence = own_odds(base_logits, hidden, anchors, tokens, heads)
        confidence = confidence if candidates is None else candidates.sure(confidence)
    return DraftBlock(tokens, None, confidence, distribution)


def w2_of(heads):
    """[v, r] float32, whatever is stored."""
    w2 = heads.markov.w2
    if not isinstance(w2, Int8Weight):
        return w2.float()
    # A selector reads a few rows, in the dtype that they had.
    return w2.codes * w2.scales[:, None] if heads.shortlist is None else w2.rounded.float()


def raised(scores, candidates, slot, vocabulary):
    """Scores with those of live chains' candidates raised, request by request, and which of these have no column."""
    scores, outright = scores.clone(), torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    for request, (matched, followed, *tokens) in enumerate(candidates.chains.tolist()):
        token, boost = tokens[slot], float(candidates.weights[0, matched, slot])
        if followed < slot or token < 0:
            continue
        column = token if vocabulary is None else int(vocabulary.columns[token])
        if column >= 0:
            scores[request, column] += boost
        else:
            outright[request] = boost >= OUTRIGHT
    return scores, outright


def shortlist(base_logits, heads, candidates):
    """[bs, gamma, v] bool: the columns that compete, of which a candidate that weighs something is one."""
    listed = torch.zeros_like(base_logits, dtype=torch.bool)
    for (request, slot), row in ((place, base_logits[place]) for place in places(base_logits)):
        listed[request, slot, row.topk(min(heads.shortlist, len(row))).indices] = True
        if candidates is not None:
            token, matched = int(candidates.chains[request, 2 + slot]), int(candidates.chains[request, 0])
            if token >= 0 and candidates.weights[0, matched, slot] > 0:
                column = token if heads.vocabulary is None else int(heads.vocabulary.columns[token])
                listed[request, slot, column] |= column >= 0
    return listed


def own_odds(base_logits, hidden, anchors, tokens, heads):
    """[bs, gamma] log odds of the likeliest column by the softmax over the best ones, cut at 30."""
    odds, walk = torch.empty_like(tokens, dtype=torch.float32), MarkovWalk(heads.markov, hidden)
    for slot in range(tokens.shape[1]):
        biases = walk.latent(anchors if slot == 0 else tokens[:, slot - 1]).float() @ w2_of(heads).T
        for request in range(len(tokens)):
            best = base_logits[request, slot].topk(min(heads.shortlist, base_logits.shape[2])).indices.tolist()
            probs = (base_logits[request, slot, best].double() + biases[request, best]).softmax(-1)
            odds[request, slot] = torch.logit(probs.max()).clamp(-30, 30)
    return odds


def places(base_logits):
    """Each request and slot."""
    return [(request, slot) for request in range(base_logits.shape[0]) for slot in range(base_logits.shape[1])]
