"""Recorded blocks, on disk and drawn from."""

import numpy as np
import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, OwnBlocks, RecordedBlocks


def recorded(with_logits=True):
    """Two answers: one whose drafts are never accepted, one whose drafts always are."""
    accepted = np.array([0, 0, 0, 2, 2])
    logits = np.array([[-3.0, -2.0]] * 3 + [[2.5, 3.5]] * 2) if with_logits else None
    return RecordedBlocks(2, accepted, logits, np.array([0, 0, 0, 1, 1]), "two answers")


@pytest.mark.parametrize("with_logits", [True, False])
def test_they_survive_the_disk(tmp_path, with_logits):
    blocks = recorded(with_logits)
    blocks.save(tmp_path / "blocks.jsonl")
    loaded = RecordedBlocks.load(tmp_path / "blocks.jsonl")
    assert (loaded.gamma, loaded.name) == (2, "two answers")
    np.testing.assert_array_equal(loaded.accepted, blocks.accepted)
    np.testing.assert_array_equal(loaded.answer, blocks.answer)
    assert (loaded.logits is None) == (not with_logits)
    if with_logits:
        np.testing.assert_allclose(loaded.logits, blocks.logits)


def test_a_request_keeps_to_one_answer():
    logits, accepted = recorded().draw([0, 1, 2, 3, 1], np.random.default_rng(0))
    assert accepted.tolist() == [0, 2, 0, 2, 2]
    assert (logits[:, 0] > 0).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "something", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [1]}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [3]}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [1], "logits": [[1]]}',
    ],
)
def test_files_that_are_none(tmp_path, text):
    (tmp_path / "blocks.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="evaluate --blocks"):
        RecordedBlocks.load(tmp_path / "blocks.jsonl")


def test_the_head_of_drawn_blocks_is_calibrated():
    source = ConditionalAcceptance((0.8, 0.5))
    logits, accepted = source.draw([0] * 50_000, np.random.default_rng(1))
    predicted = 1 / (1 + np.exp(-logits))
    assert predicted.mean(0) == pytest.approx([0.8, 0.5], abs=0.01)
    sure = predicted[:, 0] > 0.9
    assert (accepted[sure] >= 1).mean() == pytest.approx(predicted[sure, 0].mean(), abs=0.01)
    assert (accepted >= 2).mean() == pytest.approx(0.4, abs=0.01)


def test_rates_that_are_no_probabilities():
    with pytest.raises(ConfigError, match="probabilities"):
        ConditionalAcceptance((0.5, 1.5))


@pytest.mark.parametrize("with_logits", [True, False])
def test_the_nth_block_of_a_request_is_the_same_whatever_others_took(with_logits):
    rng = np.random.default_rng(2)
    accepted, answer = rng.integers(0, 3, 400), np.zeros(400, dtype=np.int64)
    source = RecordedBlocks(2, accepted, rng.normal(size=(400, 2)) if with_logits else None, answer)
    together, alone = OwnBlocks(source), OwnBlocks(source)
    for _ in range(100):
        logits, accepted = together.draw([5, 2, 9], rng)
        own_logits, own = alone.draw([2], rng)
        assert accepted[1] == own[0]
        assert (logits is None) == (not with_logits)
        if with_logits:
            np.testing.assert_array_equal(logits[1], own_logits[0])
    others = [OwnBlocks(source, seed).draw([2] * 20, rng)[1].tolist() for seed in (0, 1)]
    assert others[0] != others[1]
    assert others[0] != OwnBlocks(source).draw([3] * 20, rng)[1].tolist()
