"""The losses of drafter training and their gradient, over the two vocabularies, in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import distribution_loss, distribution_loss_ref
from harness import Case

ROWS = 512


def cases(device: torch.device) -> list[Case]:
    """A batch of rows over each vocabulary, with and without weights of the tokens."""
    torch.manual_seed(0)
    return [_case(v, weighted, device) for v in (49152, 151936) for weighted in (False, True)]


def _case(v: int, weighted: bool, device: torch.device) -> Case:
    logits, target_logits = (torch.randn(ROWS, v, device=device, dtype=torch.bfloat16) for _ in range(2))
    arguments = (
        logits,
        target_logits,
        torch.zeros(v, device=device) if weighted else None,
        torch.randint(v, (ROWS,), device=device),
        torch.ones(ROWS, device=device),
    )
    weights = {"ce_weight": 0.1, "tv_weight": 0.9}
    return Case(
        name="distribution_loss weighted" if weighted else "distribution_loss",
        shape={"rows": ROWS, "v": v},
        run=partial(distribution_loss, *arguments, **weights),
        reference=partial(distribution_loss_ref, *arguments, **weights),
        bytes_moved=3 * logits.nbytes,
        flops=0,
    )
