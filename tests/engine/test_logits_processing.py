"""Tests of requests whose logits are adjusted, through prefills, steps and their ends.

Where a target gives NaN, SGLang's switches do what they do on a plain server.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang_objects import batch, request

from sglang_dspark.engine import logits_processing as module
from sglang_dspark.engine.logits_processing import SWITCHES, Adjustments, NanCheck, adjustment_of, has_adjustment

VOCAB = 20


def asking(output_ids: list[int] | None = None, **parameters: Any) -> Req:
    """A request whose model has more ends than its tokenizer knows, and the other way round."""
    made = request(output_ids or [], **parameters)
    made.eos_token_ids = {1, 4}
    made.tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids={2, VOCAB + 5})
    return made


def prefill(adjuster: Adjustments, *reqs: Req) -> torch.Tensor:
    logits = torch.zeros(len(reqs), VOCAB)
    adjuster.first_logits(batch(*reqs), logits)
    return logits


def step(adjuster: Adjustments, *reqs: Req) -> torch.Tensor:
    """Logits [bs, V] of a step that verifies nothing, from 0."""
    logits, indptr = torch.zeros(len(reqs), VOCAB), torch.arange(len(reqs) + 1)
    nothing = torch.zeros(len(reqs), dtype=torch.int64)
    plan = SimpleNamespace(requests=indptr[:-1], columns=nothing, input_ids=nothing, indptr=indptr)
    if part := adjuster.step_comes(batch(*reqs)):
        part.after_verify(plan, logits)
    return logits


@pytest.fixture
def adjuster() -> Adjustments:
    return Adjustments(VOCAB, torch.device("cpu"))


def test_batches_without_adjustments_are_left_alone(adjuster):
    plain, greedy = asking(), asking(temperature=0.0, stop=["x"], frequency_penalty=0.0)
    prefill(adjuster, plain, greedy)
    assert adjuster.step_comes(batch(plain, greedy)) is None
    penalised = asking(presence_penalty=1.0)
    prefill(adjuster, plain, penalised)
    assert adjuster.step_comes(batch(plain, penalised)) is not None
    assert adjuster.step_comes(batch(plain)) is None


def test_counts_follow_the_request_through_changing_batches(adjuster):
    reqs = [asking(frequency_penalty=float(1 + i % 2)) for i in range(20)]  # more than the first table holds
    prefill(adjuster, *reqs)
    plain = asking()
    for i, req in enumerate(reqs):
        adjuster.count([plain, req], torch.tensor([[5, 5], [i % VOCAB, -1]]))
    shuffled = [*reversed(reqs), plain]
    expected = torch.zeros(21, VOCAB)
    for row, i in enumerate(reversed(range(20))):
        expected[row, i] = -float(1 + i % 2)
    assert torch.equal(step(adjuster, *shuffled), expected)


def test_a_running_request_keeps_the_counts_of_the_device_next_to_a_prompt(adjuster):
    """Under overlap its last tokens are not on the host yet."""
    running, prompt = asking(frequency_penalty=1.0), asking([7], frequency_penalty=2.0)
    prefill(adjuster, running)
    adjuster.count([running], torch.tensor([[5, 5]]))
    logits = torch.zeros(2, VOCAB)
    adjuster.first_logits(batch(prompt, running, decoding_reqs=[running]), logits)
    assert logits[1, 5] == -2 and logits[0, 7] == -2
    assert logits.count_nonzero() == 2


def test_slots_of_the_finished_are_used_again(adjuster):
    first = [asking(presence_penalty=1.0) for _ in range(8)]
    prefill(adjuster, *first)
    adjuster.count(first, torch.full((8, 1), 3))
    first[2].finished_reason, first[5].is_retracted = "of some kind", True
    later = [asking(presence_penalty=0.5) for _ in range(2)]
    assert torch.equal(prefill(adjuster, *later), torch.zeros(2, VOCAB))  # nothing of the former owners
    assert adjuster._table is not None and len(adjuster._table) == 8
    adjusted = step(adjuster, *first, *later)
    kept = [row for row in range(8) if row not in (2, 5)]
    assert (adjusted[kept, 3] == -1).all()
    assert (adjusted[[2, 5, 8, 9]] == 0).all()


def test_the_finished_are_forgotten_when_the_batch_changes(adjuster):
    """Else a server keeps their texts, and looks for adjustments in every step."""
    first, plain = asking(presence_penalty=1.0), asking()
    prefill(adjuster, first)
    assert adjuster.step_comes(batch(first, plain)) is not None
    first.finished_reason = "of some kind"
    assert adjuster.step_comes(batch(plain)) is None
    held, first = weakref.ref(first), None
    assert held() is None
    assert torch.equal(step(adjuster, plain), torch.zeros(1, VOCAB))


def test_a_retracted_request_starts_from_its_output(adjuster):
    req = asking(frequency_penalty=1.0)
    prefill(adjuster, req)
    adjuster.count([req], torch.tensor([[4, 4, 7]]))
    # The last step's tokens were dropped with the retraction.
    req.output_ids = [4]
    req.is_retracted = True
    prefill(adjuster, asking(presence_penalty=1.0))
    req.is_retracted = False
    assert prefill(adjuster, req)[0].nonzero().tolist() == [[4]]
    adjuster.count([req], torch.tensor([9]).view(1, 1))
    assert step(adjuster, req)[0].nonzero().flatten().tolist() == [4, 9]


def test_what_ends_the_text_before_min_new_tokens(adjuster):
    req = asking(min_new_tokens=2, stop_token_ids=[7, -3])
    assert sorted(adjustment_of(req, VOCAB).stop_token_ids) == [1, 2, 4, 7]
    assert prefill(adjuster, req)[0].isinf().nonzero().flatten().tolist() == [1, 2, 4, 7]
    adjuster.count([req], torch.tensor([[3, 3]]))
    assert not step(adjuster, req).isinf().any()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [({}, False), ({"logit_bias": {}}, False), ({"logit_bias": {"3": 1.0}}, True), ({"repetition_penalty": 0.9}, True)],
)
def test_which_requests_have_adjustments(parameters, expected):
    assert has_adjustment(asking(**parameters)) == expected


def test_masks_of_grammars_wait_for_no_forward(adjuster, monkeypatch):
    """A copy from memory that is not pinned would wait for the verification that is under way."""
    bitmask = torch.full((2, 1), -1, dtype=torch.int32)
    sent, applied = [], []
    monkeypatch.setattr(module, "grammar_masks", lambda reqs, windows, vocab_size: ([0, 2], bitmask))
    monkeypatch.setattr(module, "to_device", lambda tensor, device: (sent.append(tensor), tensor)[1])
    monkeypatch.setattr(module, "mask_tokens", lambda *given: applied.append(given))
    adjuster.mask([asking(), asking()], logits := torch.zeros(3, VOCAB), [[0], [0, 1]])
    assert [tensor is bitmask for tensor in sent] == [True]
    [(masked, rows, found)] = applied
    assert masked is logits
    assert found is bitmask
    assert rows.tolist() == [0, 2]


def test_the_first_token_of_a_text_counts_for_its_penalties():
    part, req = Adjustments(VOCAB, torch.device("cpu")), asking(presence_penalty=2.0)
    given, logits = batch(req), torch.zeros(1, VOCAB)
    part.first_logits(given, logits)
    part.first_tokens(given, torch.tensor([4]))
    nothing, indptr = torch.zeros(1, dtype=torch.int64), torch.arange(2)
    plan = SimpleNamespace(requests=nothing, columns=nothing, input_ids=nothing, indptr=indptr)
    part.step_comes(given).after_verify(plan, logits)
    assert logits.nonzero().tolist() == [[0, 4]] and logits[0, 4] == -2


def test_memory_is_held_for_the_table_of_all_requests():
    """It doubles, so that of nine requests has sixteen rows."""
    with Adjustments(VOCAB, torch.device("cpu")).held(9) as table:
        assert len(table) == 16


def logits():
    return torch.tensor([[0.5, float("nan"), -float("inf")], [1.0, 2.0, 3.0]])


def test_nothing_is_looked_at_by_default():
    assert NanCheck.of(None) is None


def test_nan_is_replaced_where_sglang_is_asked_to():
    """It is replaced in first tokens, and in the rows of every step."""
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        check = NanCheck.of(None)
        for look in (check.first_logits, check.step_comes(None).after_verify):
            look(None, seen := logits())
            assert seen[0].tolist() == pytest.approx([0.5, -1e30, -1e30])
            assert torch.equal(seen[1], logits()[1])


@pytest.mark.parametrize("switch", SWITCHES[1:], ids=lambda switch: switch.name)
def test_nan_ends_the_server_where_sglang_is_asked_to(switch):
    with switch.override(True), pytest.raises(RuntimeError, match=r"Expected Tensor|NaN"):
        NanCheck.of(None).first_logits(None, logits())
