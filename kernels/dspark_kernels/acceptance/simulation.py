"""Acceptance by chance: what verification would keep of a drafter that this one stands in for.

A model with random weights has the step times of its shape, and its drafts are never accepted. Here draft i is kept
with a given probability if all before it are, so that steps commit as many tokens as those of a trained pair would.
The outcome has nothing to do with the target's distribution: it is for measuring times. So its noise is torch's own,
which takes one launch where the keyed noise of real verdicts takes hundreds in plain torch.
"""

from __future__ import annotations

import torch

from dspark_kernels.acceptance.outcome import AcceptResult


def simulated_accept(
    accepted: AcceptResult,
    draft_tokens: torch.Tensor,  # [bs, gamma] int64
    verify_lens: torch.Tensor,  # [bs] int
    probabilities: torch.Tensor,  # [>= gamma] float64
) -> AcceptResult:
    """Keep drafts by chance, in place of what was judged. Safe under graph capture, no host sync.

    Args:
        accepted: what verification says; its bonus tokens stay, wherever they then stand.
        draft_tokens: the proposals; gamma = 0 is a plain step.
        verify_lens: drafts under verification, 0..gamma.
        probabilities: of keeping the draft of a slot when all before it are kept.
    """
    bs, gamma = draft_tokens.shape
    slots = torch.arange(gamma + 1, device=draft_tokens.device)
    kept = torch.rand((bs, gamma), dtype=torch.float64, device=draft_tokens.device) < probabilities[:gamma]
    kept &= slots[:-1] < verify_lens[:, None]
    lens = kept.long().cumprod(-1).sum(-1)
    bonus = accepted.bonus_tokens
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1))
    out_tokens = torch.where(slots < lens[:, None], drafts, -1)
    out_tokens = torch.where(slots == lens[:, None], bonus[:, None], out_tokens)
    return AcceptResult(lens, bonus, out_tokens, accepted.new_seq_lens - accepted.accept_lens + lens)
