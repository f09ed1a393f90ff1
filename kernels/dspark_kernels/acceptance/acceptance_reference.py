"""Acceptance in plain torch: how many drafts the target keeps, and the token that follows them.

Draft i of a request is judged by p_t of its verify row i. Each request follows its own rule:

* greedy: keep while the draft is the target's argmax; the argmax at the first miss follows;
* sampled (Leviathan et al. 2023; DSpark, section 2): keep while u < min(1, p_t(x) / p_d(x)); after a rejection draw
  from (p_t - p_d)+ renormalised, after a fully kept block from p_t;
* seeded: y = argmax(log p_t + g(seed, position)); keep while the draft is y; y at the first miss follows.

The output of the sampled rule is distributed as p_t for every proposal p_d the drafts were really drawn from. Reporting
a copied token as p_d = one-hot is exact too, whatever it was copied from, as long as its source was fixed beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_kernels.drafting.heads import DraftBlock, DraftDistribution
from dspark_kernels.noise import Purpose, RoundKeys
from dspark_kernels.preparation import Windows
from dspark_kernels.sampling import SamplingBatch, reads_are_free, seeded_argmax, target_probs


@dataclass(frozen=True)
class AcceptResult:
    """The outcome of one verification.

    Attributes:
        accept_lens: [bs] int64, number of drafts kept, 0..verify_len.
        bonus_tokens: [bs] int64, the token after them: correction or bonus, the next round's anchor.
        out_tokens: [bs, gamma + 1] int64: the kept drafts, the bonus token, then -1.
        new_seq_lens: [bs] int64, committed tokens after this round.
    """

    accept_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    out_tokens: torch.Tensor
    new_seq_lens: torch.Tensor


# Where p_t and p_d agree up to float32 rounding, the residual is rounding noise. Below this mass the row's p_t is drawn
# instead; the choice is made with at most that probability.
MIN_RESIDUAL_MASS = 1e-8


def accept_ref(
    block: DraftBlock,
    windows: Windows,
    target_logits: torch.Tensor,  # [N, V]
    prefix_lens: torch.Tensor,  # [bs] int64
    rows: SamplingBatch,
    keys: RoundKeys,
) -> AcceptResult:
    """Judge the drafts of every request in plain torch; :func:`dspark_kernels.accept` says what is what.

    Returns:
        The outcome; on CUDA without a host sync.

    Raises:
        ValueError: draft and target disagree on the vocabulary or the block.
    """
    drafts, verify_lens, indptr = block.tokens, windows.verify_lens, windows.indptr
    bs, gamma = drafts.shape
    distribution = block.distribution if rows.any_sampled and gamma else None
    if distribution is not None:
        distribution.check(drafts, target_logits.shape[1])
    slots = torch.arange(gamma + 1, device=drafts.device)
    # Rows of target_logits by request and slot; slots past a request's bonus row point astray and are never used.
    grid = (indptr[:-1, None] + slots).clamp_max_(target_logits.shape[0] - 1)  # [bs, gamma + 1]
    lens, bonus = drafts.new_empty(bs), drafts.new_empty(bs)
    if rows.any_greedy:
        index = rows.greedy_index
        choices = target_logits.argmax(-1)[grid[index]]
        lens[index], bonus[index] = _keep_matches(drafts[index], verify_lens[index], choices)
    if rows.any_seeded:
        index = rows.seeded_index
        group = drafts[index], verify_lens[index]
        choices = _seeded_choices(*group, target_logits, grid[index], rows, keys.positions[index])
        lens[index], bonus[index] = _keep_matches(*group, choices)
    if rows.any_sampled:
        index = rows.sampled_index
        probs, prob_grid = _sampled_target_probs(target_logits, indptr, grid, rows)
        lens[index], bonus[index] = _keep_by_ratio(
            drafts[index],
            verify_lens[index],
            probs,
            prob_grid,
            distribution,
            None if block.copied is None else block.copied[index],
            index,
            keys.take(index),
        )
    out_tokens = torch.nn.functional.pad(drafts, (0, 1), value=-1).masked_fill_(slots >= lens[:, None], -1)
    out_tokens.scatter_(1, lens[:, None], bonus[:, None])
    return AcceptResult(lens, bonus, out_tokens, prefix_lens + lens + 1)


def _leading_run(kept: torch.Tensor, verify_lens: torch.Tensor) -> torch.Tensor:
    """[m] int64: length of the run of kept drafts [m, gamma] from slot 0, within the verified ones."""
    slots = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (slots < verify_lens[:, None])).cumprod(-1).sum(-1)


def _keep_matches(
    draft_tokens: torch.Tensor,  # [m, gamma]
    verify_lens: torch.Tensor,  # [m]
    choices: torch.Tensor,  # [m, gamma + 1] the target's own token at every slot
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths and next tokens [m] of requests whose target has exactly one choice per slot."""
    lens = _leading_run(draft_tokens == choices[:, :-1], verify_lens)
    return lens, choices.gather(1, lens[:, None]).squeeze(1)


def _seeded_choices(
    draft_tokens: torch.Tensor,  # [m, gamma]
    verify_lens: torch.Tensor,  # [m]
    target_logits: torch.Tensor,  # [N, V]
    grid: torch.Tensor,  # [m, gamma + 1] rows of target_logits
    rows: SamplingBatch,
    positions: torch.Tensor,  # [m] of slot 0
) -> torch.Tensor:
    """[m, gamma + 1] the seeded draws from p_t, slot by slot because the noise costs more than anything else here."""
    seeds = rows.seeds[rows.seeded_index]
    choices = torch.full_like(grid, -1)
    undecided = torch.ones_like(verify_lens, dtype=torch.bool)
    for slot in range(grid.shape[1]):
        probs = target_probs(target_logits[grid[:, slot]], rows.seeded_params)
        choices[:, slot] = seeded_argmax(probs, seeds, positions + slot)
        if slot < draft_tokens.shape[1] and reads_are_free(probs):
            undecided &= (draft_tokens[:, slot] == choices[:, slot]) & (slot < verify_lens)
            if not undecided.any():
                break
    return choices


def _sampled_target_probs(
    target_logits: torch.Tensor,  # [N, V]
    indptr: torch.Tensor,  # [bs + 1]
    grid: torch.Tensor,  # [bs, gamma + 1]
    rows: SamplingBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """p_t of the sampled requests' rows [R, V] float32, and where in it each slot lies [m, gamma + 1]."""
    index, num_rows = rows.sampled_index, target_logits.shape[0]
    group_grid = grid[index]
    if group_grid.numel() >= num_rows:
        row_ids = torch.arange(num_rows, device=grid.device)
        owners = (torch.searchsorted(indptr, row_ids, right=True) - 1).clamp_max_(len(rows) - 1)
        return target_probs(target_logits, rows.filter_params.expand(owners)), group_grid
    owners = index.repeat_interleave(grid.shape[1])
    probs = target_probs(target_logits[group_grid.flatten()], rows.filter_params.expand(owners))
    return probs, torch.arange(probs.shape[0], device=grid.device).view_as(group_grid)


def _keep_by_ratio(
    draft_tokens: torch.Tensor,  # [m, gamma]
    verify_lens: torch.Tensor,  # [m]
    probs: torch.Tensor,  # [R, V] p_t
    grid: torch.Tensor,  # [m, gamma + 1] rows of probs
    distribution: DraftDistribution | None,  # of the whole batch: p_d; 1 for later drafts
    copied: torch.Tensor | None,  # [m, drawn]
    requests: torch.Tensor,  # [m] in the batch
    keys: RoundKeys,  # of the m requests
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths and next tokens [m] of sampled requests."""
    gamma = draft_tokens.shape[1]
    tokens = draft_tokens.clamp_min(0)  # padding must hold valid indices
    target_mass = probs[grid[:, :-1], tokens].double()
    draft_mass = torch.ones_like(target_mass)
    drawn = 0 if distribution is None else distribution.scores.shape[1]
    if distribution is not None:
        if drawn < gamma:
            known = torch.zeros_like(tokens[:, :drawn], dtype=torch.bool) if copied is None else copied
            copied = torch.nn.functional.pad(known, (0, gamma - drawn), value=True)
        slots = torch.arange(drawn, device=tokens.device)
        draft_mass[:, :drawn] = distribution.mass(requests[:, None], slots, tokens[:, :drawn])
        draft_mass = draft_mass if copied is None else draft_mass.masked_fill_(copied, 1.0)
    lens = _leading_run(keys.kept(draft_mass, target_mass), verify_lens)

    rejected = lens < verify_lens
    here = torch.arange(lens.shape[0], device=lens.device)
    weights = probs[grid[here, lens]]
    if gamma > 0:
        slot = lens.clamp_max(gamma - 1)
        removed = None if distribution is None else distribution.row(requests, slot.clamp_max(drawn - 1))
        residual = _residual(weights, removed, tokens[here, slot], None if copied is None else copied[here, slot])
        use_residual = rejected & (residual.sum(-1) > MIN_RESIDUAL_MASS)
        weights = torch.where(use_residual[:, None], residual, weights)
    purpose = torch.where(rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    return lens, keys.drawn(weights, keys.uniform(lens, purpose))


def _residual(
    target: torch.Tensor,  # [m, V] p_t
    draft: torch.Tensor | None,  # [m, V] p_d
    tokens: torch.Tensor,  # [m] the rejected drafts
    copied: torch.Tensor | None,  # [m]
) -> torch.Tensor:
    """(p_t - p_d)+ [m, V], not normalised; for a copied token p_d is one-hot."""
    if draft is None:
        return target.scatter(1, tokens[:, None], 0.0)
    residual = (target - draft).clamp_min_(0.0)
    if copied is None:
        return residual
    return torch.where(copied[:, None], target.scatter(1, tokens[:, None], 0.0), residual)
