"""The shapes benchmark runs a server's drafter without a server."""

from pathlib import Path

import torch
from bench_drafter_shapes import COMMITTED, USERS, TimedDrafter

from sglang_dspark.draft.formats import read_config

DRAFT = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"


def test_every_shape_drafts_and_commits():
    for proposed_tokens in (64, 256):
        drafter = TimedDrafter(read_config(DRAFT), proposed_tokens, torch.float32)
        with torch.inference_mode():
            for users in USERS:
                drafter.run(users)
                written = drafter.drafter.cache.k.abs().sum((0, 2, 3)).nonzero().squeeze(1).tolist()
                assert written == list(range(1, users * COMMITTED + 1))
                assert drafter.ms(users) > 0
