"""Values that change from step to step compile no kernel again, by Triton's own rule."""

import forms
import pytest
import torch
from dspark_kernels import (
    Candidates,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    MarkovWeights,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
    draft_block,
)
from dspark_kernels.drafting.walk_kernel import choose_kernel

BS = 3


@pytest.fixture
def launched(monkeypatch):
    """Forms of the kernels that were launched, which are not run."""
    found = []

    def note(function, *args, grid, warmup, **kwargs):
        found.append((function.__name__, *map(str, forms.bind(function, args, kwargs)[1:])))

    monkeypatch.setattr(type(choose_kernel), "run", note)
    return found


def step(seed, device):
    keys = torch.arange(BS, device=device)
    rows = SamplingBatch.from_lists([1.0] * BS, [-1] * BS, [1.0] * BS, [0.0] * BS, [None] * BS, device)
    return rows, RoundKeys(seed, 5, keys, keys)


def draft(device, v=64, depth=4, seed=0, heads=None):
    rows, keys = step(seed, device)
    base = torch.zeros(BS, depth, v, device=device)
    hidden, heads = torch.zeros(BS, depth, 4, device=device), heads or DraftHeads()
    chains = torch.zeros(BS, depth + 3, dtype=torch.int64, device=device)
    candidates = Candidates(chains, torch.zeros(2, 18, 8, device=device))
    draft_block(base, hidden, keys.positions, heads, rows, keys, candidates)


def judge(device, v=64, depth=4, seed=0):
    rows, keys = step(seed, device)
    lens = torch.full((BS,), depth, device=device)
    windows = Windows(lens, torch.arange(BS + 1, device=device) * (depth + 1))
    distribution = DraftDistribution(torch.zeros(BS, depth, v, device=device), torch.zeros(BS, depth, device=device))
    block = DraftBlock(torch.zeros(BS, depth, dtype=torch.int64, device=device), distribution=distribution)
    logits = torch.zeros(BS * (depth + 1), v, device=device)
    accept(block, windows, logits, keys.positions, rows, keys)


def distinct(launched, launch, *variants):
    """Forms of every kernel over all variants, as many as there were."""
    for variant in variants:
        launch(**variant)
    return {name: len({form for form in launched if form[0] == name}) for name, *_ in launched}


@pytest.mark.parametrize("launch", [draft, judge])
def test_no_seed_of_a_server_compiles_a_kernel(launch, launched, device):
    """Numpy, and so SGLang, takes seeds up to 2**32 - 1; Triton tells integers of 32 and of 64 bits apart."""
    seeds = [0, 1, 16, 2**30, 2**31, 2**32 - 1, 2**62]
    counts = distinct(launched, launch, *({"device": device, "seed": seed} for seed in seeds))
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("v", [12288, 12290, 12292, 12296, 12297])
def test_no_depth_compiles_the_walk(v, launched, device):
    """Rows lie depth * v apart, which is a multiple of 16 for some depths only where v is a multiple of 2, 4 or 8."""
    # Of an odd vocabulary, the slots' first columns have odd addresses.
    most = 2 if v % 4 else 1
    counts = distinct(launched, draft, *({"device": device, "v": v, "depth": depth} for depth in range(1, 9)))
    assert counts == {"choose_kernel": most}


def test_neither_depth_nor_seed_compiles_the_walk_of_a_selector(launched, device):
    tables, projection = torch.zeros(2, 67, 5, device=device), torch.zeros(5, 4, device=device)
    heads = DraftHeads(MarkovWeights(*tables, projection=projection), shortlist=3)
    variants = [{"depth": depth, "seed": seed} for depth, seed in zip(range(1, 9), [0, 1, 2**40] * 3, strict=False)]
    assert distinct(launched, draft, *({"device": device, "v": 67, "heads": heads} | each for each in variants)) == {
        "choose_listed_kernel": 1
    }


@pytest.mark.parametrize("v", [12288, 12292, 12296])
def test_no_depth_compiles_the_verdict_anew(v, launched, device):
    """But for the widths of windows, which are rounded up to powers of two."""
    counts = distinct(launched, judge, *({"device": device, "v": v, "depth": depth} for depth in (4, 5, 6, 7)))
    assert counts["judge_kernel"] == counts["mass_kernel"] == 1
