"""Drafting from a part of the vocabulary: the same numbers for its tokens, and the target's distribution in the end."""

import json

import pytest
import torch
from dspark_kernels import MarkovWalk
from reference_decoding import markov_step

from sglang_dspark.draft.reduced_vocabulary import FILE, ProposalHeads, load_token_ids, save_token_ids
from sglang_dspark.draft.weights import ResolvedDrafter, load_draft_model
from sglang_dspark.errors import CheckpointError

IDS = [3, 5, 8, 21, 40]


@pytest.fixture
def model(golden_dir):
    return load_draft_model(golden_dir / "vanilla_g7", dtype=torch.float32, device="cpu")


def test_heads_give_the_same_numbers_for_their_tokens(model):
    hidden, tokens = torch.randn(4, model.config.hidden_size), torch.tensor([1, 7, 21, 50])
    whole, part = ProposalHeads(model, None), ProposalHeads(model, IDS)
    torch.testing.assert_close(part.base_logits(hidden), whole.base_logits(hidden)[:, IDS])
    logits, part_logits = (
        MarkovWalk(heads.weights.markov, hidden[:, None]).corrected(tokens, heads.base_logits(hidden), None)
        for heads in (whole, part)
    )
    torch.testing.assert_close(part_logits, logits[:, IDS])
    bias, _, _ = markov_step(model.markov_head, tokens, hidden, None)
    assert torch.equal(logits, whole.base_logits(hidden) + bias)


def test_file(tmp_path):
    assert load_token_ids(tmp_path, 50) is None
    save_token_ids(tmp_path / FILE, [8, 3, 5])
    assert load_token_ids(tmp_path, 50) == [3, 5, 8]


def test_a_list_elsewhere_takes_the_place_of_the_drafters(golden_dir, make_checkpoint, tmp_path):
    save_token_ids(tmp_path / "list.json", IDS)
    drafter = ResolvedDrafter.read(golden_dir / "vanilla_g7")
    assert (drafter.num_proposed, drafter.proposing(tmp_path / "list.json").token_ids) == (256, IDS)
    assert drafter.with_its_list(drafter).token_ids is None
    assert drafter.proposing(tmp_path / "list.json").with_its_list(drafter).token_ids == IDS
    own = ResolvedDrafter.read(make_checkpoint(draft_vocab_size=4))
    with pytest.raises(CheckpointError, match="has heads for the 4 tokens that it was trained for"):
        own.proposing(tmp_path / "list.json")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"version": 2, "token_ids": [1]}),
        json.dumps({"version": 1, "token_ids": []}),
        json.dumps({"version": 1, "token_ids": [1, 1]}),
        json.dumps({"version": 1, "token_ids": [2, 1]}),
        json.dumps({"version": 1, "token_ids": [1, 50]}),
        json.dumps({"version": 1, "token_ids": [-1, 3]}),
        json.dumps({"version": 1, "token_ids": [1.5]}),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=FILE):
        load_token_ids(tmp_path, 50)
