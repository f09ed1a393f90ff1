"""The losses of drafter training and their gradient, over two vocabularies, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from cases import Case, case
from dspark_kernels import distribution_loss

_ROWS = 512


def cases(device: torch.device) -> Iterator[Case]:
    """Yield a batch of rows over each vocabulary, with and without weights of the tokens."""
    for v, weighted in product((49152, 151936), (False, True)):
        logits, target_logits = (torch.randn(_ROWS, v, device=device, dtype=torch.bfloat16) for _ in range(2))
        weights = torch.zeros(v, device=device) if weighted else None
        rows = torch.randint(v, (_ROWS,), device=device), torch.ones(_ROWS, device=device)
        name = "distribution_loss weighted" if weighted else "distribution_loss"
        how = {"ce_weight": 0.1, "tv_weight": 0.9}
        yield case(distribution_loss, logits, target_logits, weights, *rows, name=name, **how)
