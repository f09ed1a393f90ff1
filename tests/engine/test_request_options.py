"""What the front end makes of candidate labels, and what it costs the scheduler."""

from types import SimpleNamespace

import pytest

from sglang_dspark.engine.scheduler.options import MOST_LABEL_TOKENS, carried, proposer_of, read, settle
from sglang_dspark.proposals.proposer import Proposers
from sglang_dspark.speculation import Speculation


class Tokenizer:
    """A token for each letter."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def manager(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, server_args=SimpleNamespace(_dspark=SimpleNamespace(drafter=None)))


def settled(tokenizer, candidates, **entries):
    field = Speculation.parse({"preset": "classification", "candidates": candidates})
    request = SimpleNamespace(sampling_params={"custom_params": {**carried(field), **entries}})
    settle(manager(tokenizer), request)
    params = SimpleNamespace(custom_params=request.sampling_params["custom_params"])
    return SimpleNamespace(sampling_params=params, origin_input_ids=[1, 2])


def test_labels_arrive_in_both_spellings():
    req = settled(Tokenizer(), ["ab"])
    proposer = proposer_of(Proposers(), req, read(req))
    proposer.extend([ord(" ")])
    assert proposer.propose(9) == [ord("a"), ord("b")]
    proposer.extend([ord("a")])
    assert proposer.propose(9) == [ord("b")]


def test_the_labels_of_a_batch_are_tokenized_once():
    tokenizer = Tokenizer()
    for _ in range(3):
        settled(tokenizer, ["yes", "no"])
    assert tokenizer.calls == 1


def test_too_many_tokens_are_refused_by_name():
    candidates = [f"{place:0100d}" for place in range(100)]
    with pytest.raises(
        ValueError, match=rf"speculation.candidates are {100 * 201} tokens.*at most {MOST_LABEL_TOKENS}"
    ):
        settled(Tokenizer(), candidates)
    assert settled(Tokenizer(), candidates[:80])


@pytest.mark.parametrize("candidates", [["\N{GRINNING FACE}" * 51], [f"{place:0199d}" for place in range(200)]])
def test_too_many_bytes_are_refused_before_they_are_tokenized(candidates):
    with pytest.raises(
        ValueError, match=r"speculation.candidates must be strings of at most 200 bytes, and 32768 in all"
    ):
        settled(None, candidates)


def test_label_tokens_of_a_client_count_for_nothing():
    req = settled(Tokenizer(), ["ab"], dspark_labels=[7, 8, -1])
    proposer = proposer_of(Proposers(), req, read(req))
    proposer.extend([7])
    assert proposer.propose(9) == []
    request = SimpleNamespace(sampling_params={"custom_params": {"dspark_labels": [7] * 1000}})
    settle(manager(None), request)
    assert request.sampling_params["custom_params"] == {}
