"""Laying out a decode step of gamma 7."""

from __future__ import annotations

from functools import partial

import torch
from bench_plans import step_requests
from dspark_kernels import PreparedStep, prepare, prepare_ref
from harness import Case

GAMMA = 7
MASK_TOKEN = 151_669


def cases(device: torch.device) -> list[Case]:
    """Every batch size, into the buffers of a graph."""
    torch.manual_seed(0)
    found = []
    for bs in (1, 8, 64, 256):
        out = PreparedStep.empty(bs, GAMMA, device)
        arguments = (step_requests(bs, GAMMA, device), GAMMA, MASK_TOKEN, out)
        written = sum(buffer.numel() * buffer.element_size() for buffer in vars(out).values())
        found.append(
            Case(
                name="prepare",
                shape={"bs": bs, "gamma": GAMMA},
                run=partial(prepare, *arguments),
                reference=partial(prepare_ref, *arguments),
                bytes_moved=written + bs * 3 * 8,
                flops=0,
            )
        )
    return found
