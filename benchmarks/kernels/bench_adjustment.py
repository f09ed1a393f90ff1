"""Penalties and biases on the rows of a verification of whole blocks, every request with all kinds of them."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import Adjustment, AdjustmentTable, adjust, adjust_ref
from harness import Case

GAMMA = 7
_EVERYTHING = Adjustment(0.1, 0.1, 1.1, 8, (0, 1), {2: 0.5})


def cases(device: torch.device) -> list[Case]:
    """Two vocabularies at every batch size that a server has slots for."""
    torch.manual_seed(0)
    return [_case(bs, vocab_size, device) for vocab_size in (49152, 151936) for bs in (1, 8, 64)]


def _case(bs: int, vocab_size: int, device: torch.device) -> Case:
    width = GAMMA + 1
    num_rows = bs * width
    table = AdjustmentTable.empty(bs, vocab_size, device)
    for slot in range(bs):
        table.set(slot, _EVERYTHING, range(100))
    rows = torch.arange(num_rows, device=device)
    # Adjusted in place again and again: the values go astray, the time does not depend on them.
    logits = torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16)
    arguments = (
        *(logits, table, torch.arange(bs, device=device), rows // width, rows % width),
        torch.randint(vocab_size, (num_rows,), device=device),
        torch.arange(0, num_rows + 1, width, device=device),
    )
    return Case(
        name="adjust",
        shape={"bs": bs, "gamma": GAMMA, "V": vocab_size},
        run=partial(adjust, *arguments),
        reference=partial(adjust_ref, *arguments),
        # The rows there and back; counts, stops and biases of each request once.
        bytes_moved=2 * logits.nbytes + 9 * bs * vocab_size,
        flops=0,
    )
