"""The outcome of a verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AcceptResult:
    """What one verification leaves.

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
