"""Presets are told all committed text of their request, whatever SGLang has seen of it."""

from array import array
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.engine.scheduler.request_options import BatchOptions
from sglang_dspark.proposals.proposer import Proposers
from sglang_dspark.speculation import Speculation
from sglang_dspark.worker.preset_texts import UNITS_PER_STEP, PresetTexts

MAX_VERIFY, VOCAB_SIZE = 4, 100


class Recorder:
    """A proposer that proposes the last tokens it was told."""

    def __init__(self, prompt):
        self.output = []
        self.prompt = list(prompt)

    def extend(self, tokens):
        self.output += tokens

    def prepare(self, most):
        self.prepared = most
        return 1000

    def propose(self, most):
        return self.output[-most:]


def request(rid="r", **options):
    carried = msgspec.json.encode(Speculation.parse(options).for_scheduler(())).decode()
    params = SimpleNamespace(custom_params={"dspark": carried} if options else None)
    return SimpleNamespace(rid=rid, sampling_params=params, origin_input_ids=array("q", [5, 6]), output_ids=array("q"))


def options_of(reqs, max_verify=MAX_VERIFY):
    return BatchOptions.of(reqs, max_verify, torch.device("cpu"))


def step_of(reqs, texts):
    """The decode batch of requests whose whole outputs are ``texts``, the last token being the anchor."""
    prefix_lens = [len(req.origin_input_ids) + len(text) - 1 for req, text in zip(reqs, texts, strict=True)]
    return SimpleNamespace(anchors=torch.tensor([text[-1] for text in texts]), prefix_lens=torch.tensor(prefix_lens))


def committed(rows):
    width = max(map(len, rows))
    return SimpleNamespace(out_tokens=torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows]))


@pytest.fixture
def proposers(monkeypatch):
    made = []

    def make(proposers, options, prompt):
        made.append(Recorder(prompt))
        return made[-1]

    monkeypatch.setattr(Proposers, "make", make)
    return made


tokens = st.lists(st.integers(0, 9), min_size=1, max_size=MAX_VERIFY + 1)


@given(
    st.lists(st.tuples(tokens, st.sampled_from(["ahead", "behind", "retracted", "alone", "reused"])), max_size=12),
    st.integers(0, 9),
)
def test_all_that_is_committed_is_known_and_nothing_else(rounds, first):
    """Step by step, with SGLang up to a step behind, a request that is retracted, and one that takes over its id."""
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(Proposers, "make", lambda proposers, options, prompt: made.append(Recorder(prompt)) or made[-1])
        texts = PresetTexts(MAX_VERIFY, VOCAB_SIZE)
        req, other = request(preset="summarization"), request("plain")
        text = [first]
        for row, event in rounds:
            reqs = [other, req]
            options = options_of(reqs)
            copies = texts.propose(reqs, options, step_of(reqs, [[1], text]))
            assert made[-1].output == text
            assert copies.lens == (0, min(len(text), MAX_VERIFY))
            assert copies.tokens[1, : copies.lens[1]].tolist() == text[-MAX_VERIFY:]
            assert copies.mask.sum(1).tolist() == list(copies.lens)
            texts.took(reqs, options, committed([[1], row]))
            known = list(text)
            text = text + row
            if event == "ahead":
                known = list(text)
            elif event == "retracted":
                # What was under way is dropped, and the token after the rest is drawn again.
                text = [*known, 9 - row[0]]
            elif event == "alone":
                texts.propose([other], options_of([other]), step_of([other], [[1]]))
                known = text[:-1]
            elif event == "reused":
                req, known, text = request(preset="summarization"), [], [3]
            req.output_ids = array("q", known)


def test_batches_without_presets_hold_nothing(proposers):
    texts = PresetTexts(MAX_VERIFY, VOCAB_SIZE)
    for options in ({}, {"max_verify": 1}, {"preset": "summarization", "enabled": False}):
        reqs = [request(**options)]
        assert texts.propose(reqs, options_of(reqs), step_of(reqs, [[4]])) is None
        texts.took(reqs, options_of(reqs), committed([[4]]))
    assert proposers == []


def test_copies_stay_within_every_bound(proposers):
    texts = PresetTexts(MAX_VERIFY, VOCAB_SIZE)
    summary = {"preset": "summarization"}
    reqs = [request("a", **summary), request("b", **summary, max_draft=2), request("c", **summary, max_verify=3)]
    for req in reqs:
        req.output_ids = array("q", range(8))
    options = options_of(reqs)
    copies = texts.propose(reqs, options, step_of(reqs, [range(8)] * 3))
    assert copies.lens == (4, 2, 3)
    assert options.limits.max_verify == (4, 4, 3)


def test_a_server_without_room_for_drafts_asks_no_preset(proposers):
    texts = PresetTexts(0, VOCAB_SIZE)
    reqs = [request(preset="summarization")]
    assert texts.propose(reqs, options_of(reqs, max_verify=0), step_of(reqs, [[4]])) is None
    assert proposers == []


def test_what_a_step_prepares_is_bounded_however_many_ask(proposers):
    texts = PresetTexts(MAX_VERIFY, VOCAB_SIZE)
    reqs = [request(str(index), preset="summarization") for index in range(6)]
    texts.propose(reqs, options_of(reqs), step_of(reqs, [[4]] * 6))
    prepared = [proposer.prepared for proposer in proposers]
    assert prepared[:4] == [UNITS_PER_STEP - 1000 * index for index in range(4)]
    # What the step before has committed of the others is known all the same.
    assert prepared[4] == prepared[5] <= 64
