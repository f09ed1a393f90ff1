"""Tests that the emitted text follows the target's distribution: a synthetic pair and many one-round trials.

Given the tokens before it, the token a round emits at slot j (kept draft, correction or bonus) must be distributed as
p_t(. | previous token), whatever was drafted. Each emitted token is mapped to a uniform number by the randomised
probability integral transform of p_t, with the vocabulary ordered by p_t / p_d. Every error of the acceptance rule
moves mass along that order, so a few bins see it where a chi-square over all tokens would drown it. The transformed
values of one slot are independent of everything before the slot, hence the strata by the previous slot's value.
"""

from dataclasses import dataclass, replace

import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import (
    DraftHeads,
    FilterParams,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept_ref,
    draft_block_ref,
    target_probs,
)
from scipy import stats

NUM_BINS = 8
NUM_STRATA = 4
CHUNK = 50_000


@dataclass(frozen=True)
class Rule:
    """The sampling parameters that all trials of a run share."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seeded: bool = False

    def rows(self, num_trials: int, first_seed: int = 0) -> SamplingBatch:
        seeds = range(first_seed, first_seed + num_trials) if self.seeded else [None] * num_trials
        columns = ([value] * num_trials for value in (self.temperature, self.top_k, self.top_p, self.min_p))
        return SamplingBatch.from_lists(*columns, list(seeds))

    def filter_params(self, num_rows: int) -> FilterParams:
        return self.rows(num_rows).filter_params


class SyntheticPair:
    """A target that is a table by previous token, and the real vanilla Markov head imitating it with errors."""

    def __init__(self, vocab_size=32, gamma=3, error=0.7, logit_offset=0.0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.gamma = vocab_size, gamma
        self.target_logits = torch.randn(vocab_size, vocab_size, generator=generator) * 1.5  # [previous, V]
        noise = torch.randn(gamma, vocab_size, generator=generator) * 0.4
        self.base_logits = noise + logit_offset
        self.markov, _ = draft_heads("vanilla", vocab_size=vocab_size, hidden_size=2, block_size=gamma, rank=vocab_size)
        errors = torch.randn(vocab_size, vocab_size, generator=generator) * error
        self.markov.markov_w1.weight.data = torch.eye(vocab_size)
        self.markov.markov_w2.weight.data = (self.target_logits + errors).T.contiguous()

    @property
    def heads(self) -> DraftHeads:
        return as_weights(self.markov, None)

    def draft_logits(self) -> torch.Tensor:
        """[gamma, previous, V] corrected logits."""
        return self.base_logits[:, None] + self.markov.markov_w2.weight.T

    def draft_distribution(self, rule: Rule) -> torch.Tensor:
        """[gamma, previous, V] p_d."""
        logits = self.draft_logits().flatten(0, 1)
        return target_probs(logits, rule.filter_params(len(logits))).view(self.gamma, self.vocab_size, self.vocab_size)

    def target_distribution(self, rule: Rule) -> torch.Tensor:
        """[previous, V] p_t."""
        return target_probs(self.target_logits, rule.filter_params(self.vocab_size))


@dataclass(frozen=True)
class Trials:
    """Outcomes of independent rounds: anchors [n], emitted tokens [n, gamma + 1] and kept counts [n]."""

    anchors: torch.Tensor
    out_tokens: torch.Tensor
    accept_lens: torch.Tensor


def run_trials(
    pair: SyntheticPair,
    rule: Rule,
    num_trials: int,
    *,
    anchor: int | None = None,
    full_blocks: bool = False,
    stored_distribution: torch.Tensor | None = None,
) -> Trials:
    """One round per trial, through ``draft_block_ref`` and ``accept_ref``.

    Verify lengths cycle through 0..gamma unless ``full_blocks``; anchors cycle through the vocabulary unless given.
    ``stored_distribution`` [gamma, previous, V] replaces the p_d that verification is told.
    """
    chunks = [
        _run_chunk(pair, rule, min(CHUNK, num_trials - first), first, anchor, full_blocks, stored_distribution)
        for first in range(0, num_trials, CHUNK)
    ]
    return Trials(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _run_chunk(pair, rule, num_trials, first, anchor, full_blocks, stored_distribution):
    gamma, vocab_size = pair.gamma, pair.vocab_size
    trial = torch.arange(num_trials)
    anchors = trial % vocab_size if anchor is None else torch.full_like(trial, anchor)
    rows, keys = rule.rows(num_trials, first), RoundKeys(2024, first, trial, trial % 1000)
    base_logits = pair.base_logits.expand(num_trials, -1, -1)
    block = draft_block_ref(base_logits, torch.zeros(num_trials, gamma, 2), anchors, pair.heads, rows, keys)
    chain = torch.cat([anchors[:, None], block.tokens], dim=1)
    verify_lens = torch.full_like(trial, gamma) if full_blocks else (trial // vocab_size) % (gamma + 1)
    verified = torch.arange(gamma + 1) <= verify_lens[:, None]
    if stored_distribution is not None:
        block = replace(block, probs=stored_distribution[torch.arange(gamma), chain[:, :-1]])
    windows = Windows(verify_lens, torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0)))
    accepted = accept_ref(block, windows, pair.target_logits[chain[verified]], keys.positions, rows, keys)
    return anchors, accepted.out_tokens, accepted.accept_lens


def distribution_p_values(pair: SyntheticPair, rule: Rule, trials: Trials) -> list[float]:
    """Return p-values of the hypothesis that emitted tokens follow the target's distribution: per slot, and for all.

    The last one counts how often the drafted slots emit a token with p_t < p_d, which only acceptance can emit.
    """
    target, draft = pair.target_distribution(rule).double(), pair.draft_distribution(rule).double()
    strata = torch.zeros_like(trials.anchors)
    p_values, excess, variance = [], 0.0, 0.0
    for slot in range(pair.gamma + 1):
        emitted = trials.out_tokens[:, slot] >= 0
        tokens = trials.out_tokens[emitted, slot]
        previous = (trials.anchors if slot == 0 else trials.out_tokens[:, slot - 1])[emitted]
        if not (target[previous, tokens] > 0).all():
            return [0.0]  # an impossible token
        proposal = draft[min(slot, pair.gamma - 1)]
        uniforms = _integral_transform(target, (target / proposal).nan_to_num(0.0), previous, tokens, slot)
        p_values.append(_uniformity(uniforms, strata[emitted]))
        strata = torch.zeros_like(strata).masked_scatter(emitted, (uniforms * NUM_STRATA).long())
        if slot < pair.gamma:
            overproposed = (target < proposal).double()
            chance = (target * overproposed).sum(-1)[previous]
            excess += (overproposed[previous, tokens] - chance).sum().item()
            variance += (chance * (1 - chance)).sum().item()
    return [*p_values, float(2 * stats.norm.sf(abs(excess) / variance**0.5))]


def mean_distance(pair: SyntheticPair, rule: Rule, trials: Trials) -> list[float]:
    """Total variation between p_d and p_t at each drafted slot, averaged over the tokens that preceded it."""
    distance = (pair.draft_distribution(rule) - pair.target_distribution(rule)).abs().sum(-1) / 2
    previous = torch.cat([trials.anchors[:, None], trials.out_tokens[:, :-1]], dim=1)
    return [distance[slot, previous[previous[:, slot] >= 0, slot]].mean().item() for slot in range(pair.gamma)]


def _integral_transform(
    target: torch.Tensor,  # [previous, V] p_t
    order: torch.Tensor,  # [previous, V] the vocabulary's order, per previous token
    previous: torch.Tensor,  # [n]
    tokens: torch.Tensor,  # [n]
    seed: int,
) -> torch.Tensor:
    """[n] values in [0, 1), uniform when tokens ~ target[previous]."""
    ranked = order.argsort(dim=-1)
    below = torch.zeros_like(target).scatter_(1, ranked, target.gather(1, ranked).cumsum(1)) - target
    spread = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (below[previous, tokens] + spread * target[previous, tokens]).clamp(0.0, 1.0 - 2.0**-53)


def _uniformity(uniforms: torch.Tensor, strata: torch.Tensor) -> float:
    """Chi-square over bins within strata."""
    cells = strata * NUM_BINS + (uniforms * NUM_BINS).long()
    counts = torch.bincount(cells, minlength=NUM_STRATA * NUM_BINS).view(NUM_STRATA, NUM_BINS).double()
    counts = counts[counts.sum(-1) > 0]
    expected = counts.mean(-1, keepdim=True)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(stats.chi2.sf(statistic, df=counts.numel() - counts.shape[0]))
