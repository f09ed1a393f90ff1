"""A step's result, from the worker's tensors to what SGLang and the statistics read."""

import time

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS, NUM_ROWS, AcceptResult
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang_objects import partly, request

from sglang_dspark.engine.batch import SamplingReader, decode_result, most_words
from sglang_dspark.step.decision import PLAIN, StepRecord
from sglang_dspark.step.packed import DeviceSpan, PackedCopies
from sglang_dspark.step.state import Confidence, StepOutcome, TargetOutput, VerifyPlan

CPU = torch.device("cpu")
CHAINS = torch.tensor([[3, 2, 7, 8, 5], [ASKED_ROWS, 1, 6, -1, -1]])


class Event:
    """One of a device, three milliseconds before another."""

    def record(self):
        pass

    synchronize = record

    def query(self):
        return True

    def elapsed_time(self, end):
        return 3.0


def accepted():
    return AcceptResult(
        accept_lens=torch.tensor([2, 0]),
        bonus_tokens=torch.tensor([9, 4]),
        out_tokens=torch.tensor([[7, 8, 9], [4, -1, -1]]),
        new_seq_lens=torch.tensor([13, 21]),
    )


def result(confidence, traced):
    rounds = StepRecord(["a", "b"], PLAIN, [2, 2], torch.tensor([2, 1]), confidence, traced, CHAINS)
    output, span = LogitsProcessorOutput(next_token_logits=None), partly(DeviceSpan, _events=(Event(), Event()))
    outcome = StepOutcome(None, partly(VerifyPlan, indptr=None), TargetOutput(output, None), accepted())
    made = decode_result(outcome, output, rounds, PackedCopies(0, CPU), span, in_graphs=True)
    made.copy_done = Event()
    return made


@pytest.mark.parametrize("logits", [None, torch.tensor([[0.5, -1.0], [2.0, 3.0]])], ids=["no head", "head"])
@pytest.mark.parametrize("traced", [None, torch.tensor([[10, 6, 7, 8], [20, 5, 3, 3]])], ids=["no trace", "trace"])
def test_what_arrives_is_what_was_sent(logits, traced):
    survival = torch.tensor([[0.9, 0.8], [0.7, 0.1]])
    made = result(Confidence(logits, survival), traced)
    assert made.next_draft_input.bonus_tokens.tolist() == [9, 4]
    assert made.next_draft_input.new_seq_lens.tolist() == made.new_seq_lens.tolist() == [13, 21]
    room, words = most_words(2, max_verify=2, gamma=2), len(made.pending.flat)
    assert words == room if logits is not None and traced is not None else words < room
    made.copy_to_cpu(return_logprob=False)
    made.read_copy()
    assert made.next_token_ids.tolist() == [7, 8, 9, 4, -1, -1]
    assert made.accept_lens.tolist() == [3, 1]  # with the bonus token
    assert made.record.verify_lens.tolist() == [2, 1]
    assert made.cap_lens.tolist() == [3, 2] and made.block_accept_lens.tolist() == [2, 1]  # SGLang adds these up
    assert torch.equal(made.record.chains, CHAINS) and made.record.followed == [2, 0] and made.record.copied == [0, 1]
    assert made.record.committed.tolist() == [[7, 8, 9], [4, -1, -1]]
    assert torch.equal(made.record.confidence.survival, survival)
    for got, sent in ((made.record.confidence.logits, logits), (made.record.traced, traced)):
        assert (got is None) == (sent is None)
        assert got is None or torch.equal(got, sent)


@pytest.mark.parametrize(
    ("row", "kind"), [(KIND_ROWS - 1, "followed"), (CACHED_ROWS + 3, "cached"), (NUM_ROWS - 1, "copied")]
)
def test_drafts_are_told_apart_by_the_chain_that_they_follow(row, kind):
    rounds = StepRecord(["a"], PLAIN, [2], torch.tensor([2]), None, None, torch.tensor([[row, 2, 7, 8]]))
    kinds = {name: getattr(rounds, name) for name in ("followed", "cached", "copied")}
    assert kinds == {name: [2 * (name == kind)] for name in kinds}


@pytest.mark.parametrize(
    ("row", "drawn"),
    [(KIND_ROWS - 1, [7, 3, 0]), (CACHED_ROWS + 3, [7, 3, 0]), (NUM_ROWS - 1, [5, 0, 0])],
    ids=["text", "cache", "preset"],
)
def test_places_that_were_copied_are_not_the_drafters(row, drawn):
    """A block of 7 drafts has candidates behind it, and what a preset copies in its place."""
    chains = torch.tensor([[row, followed, *[7] * 16] for followed in (2, 3, 9)])
    rounds = StepRecord(["a", "b", "c"], PLAIN, [15, 3, 0], torch.tensor([15, 3, 0]), None, None, chains, 7)
    assert rounds.drawn == drawn


def test_what_arrived_stays_when_the_memory_of_copies_is_used_again():
    made = result(None, None)
    made.copy_to_cpu(return_logprob=False)
    flat = made._copied.flat
    made.read_copy()
    flat.fill_(-5)
    assert made.next_token_ids.tolist() == [7, 8, 9, 4, -1, -1]
    assert made.record.verify_lens.tolist() == [2, 1]
    made.read_copy()  # once more changes nothing
    assert made.accept_lens.tolist() == [3, 1]


def test_times_of_a_step_are_known_where_a_device_tells_them():
    made = result(None, None)
    assert made.times_ms is None
    made.copy_to_cpu(return_logprob=False)
    began = time.perf_counter()
    made.copy_done.synchronize()
    device_ms, waited_ms = made.times_ms
    assert device_ms == 3.0 and 0 <= waited_ms <= (time.perf_counter() - began) * 1e3


def test_greedy_batches_share_their_sampling_rows():
    """Whatever the requests are: nothing is built or copied when one joins or leaves."""
    reader = SamplingReader(CPU)
    rows = reader.read([request(top_k=1), request(top_k=1)])
    assert rows.all_greedy
    assert len(rows) == 2
    assert reader.read([request(top_k=1), request(top_k=1, sampling_seed=3)]) is rows
    mixed = reader.read([request(top_k=1), request(sampling_seed=3)])
    assert (mixed.any_greedy, mixed.any_seeded, mixed.all_greedy) == (True, True, False)
