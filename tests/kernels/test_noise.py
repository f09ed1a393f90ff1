"""The generator against published vectors, and its keys against reuse."""

import itertools

import pytest
import torch
from dspark_kernels.noise import Purpose, exponential, philox4x32, uniform
from scipy import stats

ALPHA = 1e-4

# Random123's kat_vectors for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_every_part_of_the_key_changes_the_value():
    keys = torch.tensor([0, 1, 2**32, 2**32 + 1, -1, 2**62])
    values = [
        uniform(seed, step, keys[:, None], torch.tensor([0, 1, 2, 2**15, 2**16 - 1]), purpose).flatten()
        for seed in (0, 1, 2**32, 2**63)
        for step in (0, 1, 2**16, 2**32, 2**39)
        for purpose in Purpose
    ]
    values = torch.cat(values)
    assert values.unique().numel() == values.numel() == 4 * 5 * len(Purpose) * 6 * 5


def test_uniform_is_uniform_with_53_bits():
    values = uniform(2, 3, torch.arange(200_000), 0, Purpose.ACCEPT)
    assert values.dtype == torch.float64
    assert values.min() >= 0 and values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > ALPHA
    lattice = values * 2.0**53
    assert torch.equal(lattice, lattice.round())
    assert (lattice % 2 == 1).double().mean() > 0.49  # the last bit is used


def test_exponential_does_not_depend_on_vocabulary_or_batch():
    seeds, positions = torch.tensor([1, -7, 2**62]), torch.tensor([0, 31, 70_000])
    wide = exponential(seeds, positions, 1001)
    assert wide.shape == (3, 1001) and wide.dtype == torch.float64
    for vocab_size in (1, 2, 111, 1000):
        assert torch.equal(exponential(seeds, positions, vocab_size), wide[:, :vocab_size])
    assert torch.equal(exponential(seeds[1:2], positions[1:2], 1001), wide[1:2])


def test_exponential_distribution_and_independence_across_positions():
    noise = exponential(torch.full((100,), 77), torch.arange(100), 1000)
    assert (noise > 0).all() and noise.isfinite().all()
    assert stats.kstest(noise.flatten().numpy(), "expon").pvalue > ALPHA
    cells = ((-noise).exp() * 8).long()
    counts = torch.bincount((cells[:-1] * 8 + cells[1:]).flatten(), minlength=64).double()
    assert stats.chisquare(counts.numpy()).pvalue > ALPHA


def test_exponential_stays_finite_at_the_ends_of_the_word_range(monkeypatch):
    for word in (0, 0xFFFFFFFF):
        extreme = torch.full((1, 4), word)
        monkeypatch.setattr("dspark_kernels.noise.philox4x32", lambda *_, extreme=extreme: (extreme,) * 4)
        noise = exponential(torch.tensor([0]), torch.tensor([0]), 8)
        assert (noise > 0).all() and noise.isfinite().all()


def test_request_seed_equal_to_engine_seed_shares_no_counter(monkeypatch):
    """Both families may run under one Philox key; their counters must not meet."""
    counters = []

    def record(counter, key):
        words = torch.broadcast_tensors(*(torch.as_tensor(word) for word in counter))
        counters.append(set(zip(*(word.flatten().tolist() for word in words), strict=True)))
        return philox4x32(counter, key)

    monkeypatch.setattr("dspark_kernels.noise.philox4x32", record)
    exponential(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 64)
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.BONUS):
        uniform(0, torch.arange(3)[:, None, None], torch.arange(40)[:, None], torch.arange(8), purpose)
    for one, other in itertools.combinations(counters, 2):
        assert not one & other
