"""The losses of drafter training and their gradient, over two vocabularies, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from dspark_kernels import distribution_loss
from harness import Case

_ROWS = 512


def cases(device: torch.device) -> Iterator[Case]:
    """Yield a batch of rows over each vocabulary, with and without weights of the tokens."""
    for v, weighted in product((49152, 151936), (False, True)):
        logits, target_logits = (torch.randn(_ROWS, v, device=device, dtype=torch.bfloat16) for _ in range(2))
        weights = torch.zeros(v, device=device) if weighted else None
        rows = torch.randint(v, (_ROWS,), device=device), torch.ones(_ROWS, device=device)
        forms = (
            partial(form, logits, target_logits, weights, *rows, ce_weight=0.1, tv_weight=0.9)
            for form in (distribution_loss, distribution_loss.reference)
        )
        name = "distribution_loss weighted" if weighted else "distribution_loss"
        yield Case(name, {"rows": _ROWS, "v": v}, *forms, bytes_moved=3 * logits.nbytes)
