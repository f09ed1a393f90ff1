"""Tests of decode steps that are read from SGLang's batch, and of results that are handed back.

A cache of a batch belongs to its requests, not to their names.
"""

import time

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS, NUM_ROWS, AcceptResult, SamplingBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload, offer_future_relay_buffers
from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_objects import batch, model_config, partly, request, table, worker

from sglang_dspark.engine.batch import (
    CachedByBatch,
    SamplingReader,
    decode_result,
    most_words,
    read_decode_batch,
    round_keys,
)
from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.graphs import Relay
from sglang_dspark.engine.measure_steps import DummyBatch
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
    assert (
        torch.equal(made.record.chains, CHAINS)
        and made.record.from_text == [2, 0]
        and made.record.from_request == [0, 1]
    )
    assert made.record.committed.tolist() == [[7, 8, 9], [4, -1, -1]]
    assert torch.equal(made.record.confidence.survival, survival)
    for got, sent in ((made.record.confidence.logits, logits), (made.record.traced, traced)):
        assert (got is None) == (sent is None)
        assert got is None or torch.equal(got, sent)


@pytest.mark.parametrize(
    ("row", "kind"), [(KIND_ROWS - 1, "from_text"), (CACHED_ROWS + 3, "from_cache"), (NUM_ROWS - 1, "from_request")]
)
def test_drafts_are_told_apart_by_the_chain_that_they_follow(row, kind):
    rounds = StepRecord(["a"], PLAIN, [2], torch.tensor([2]), None, None, torch.tensor([[row, 2, 7, 8]]))
    kinds = {name: getattr(rounds, name) for name in ("from_text", "from_cache", "from_request")}
    assert kinds == {name: [2 * (name == kind)] for name in kinds}


@pytest.mark.parametrize(
    ("row", "drawn"),
    [(KIND_ROWS - 1, [7, 3, 0]), (CACHED_ROWS + 3, [7, 3, 0]), (NUM_ROWS - 1, [5, 0, 0])],
    ids=["text", "cache", "preset"],
)
def test_places_that_were_copied_are_not_the_drafters(row, drawn):
    """A block of 7 drafts has candidates after it, and what a preset copies in its place."""
    chains = torch.tensor([[row, followed, *[7] * 16] for followed in (2, 3, 9)])
    rounds = StepRecord(["a", "b", "c"], PLAIN, [15, 3, 0], torch.tensor([15, 3, 0]), None, None, chains, 7)
    assert rounds.from_drafter == drawn


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


def test_the_first_token_of_a_step_follows_the_anchor():
    """A seeded draw depends on its position: the prefill has drawn the anchor with that of the anchor."""
    prompt_len, rows = 5, SamplingBatch.from_lists([1.0], [-1], [1.0], [0.0], [7])
    lens = torch.tensor([prompt_len], dtype=torch.int32)
    state = DSparkDraftInput(bonus_tokens=torch.tensor([9]), new_seq_lens=lens, nxt_kv_lens_cpu=lens)
    rows_of_kv = torch.tensor([3], dtype=torch.int32)
    given = batch(seq_lens=lens, req_pool_indices=rows_of_kv, req_to_token_pool=table(4, 16), spec_info=state)
    prefill = round_keys(given, lens.to(torch.int64), seed=1, step=1)
    step = read_decode_batch(given, rows, seed=1, step=2)
    assert prefill.positions.tolist() == [prompt_len]
    assert step.keys.positions.tolist() == [prompt_len + 1]
    assert step.prefix_lens.tolist() == [prompt_len]
    assert not step.keeps_logits
    for asked in ("return_logprob", "return_hidden_states"):
        setattr(given, asked, True)
        assert read_decode_batch(given, rows, seed=1, step=2).keeps_logits
        setattr(given, asked, False)
    assert (step.keys.step, step.keys.request_keys.tolist(), step.anchors.tolist()) == (2, [3], [9])


def test_tokens_differ_between_requests_and_places():
    """Experts are chosen by tokens: if all were alike, a few experts would do for any number of requests."""
    target = worker(device="cpu", model_config=model_config(vocab_size=49_152))
    dummy = DummyBatch(target, requests=64, context=64, window=8)
    tokens = dummy.tokens(8)
    assert tokens.shape == (64, 8)
    assert len(tokens.unique()) == tokens.numel()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 49_152
    assert torch.equal(tokens[:, :1], dummy.tokens(1))


def test_its_states_are_padding():
    """Warm-up and step times leave no trace in the states that requests will have, nor in those of the radix cache."""
    requests, rows, pool = 3, table(4, 80), partly(MHATokenToKVPool, size=400)
    rows.enable_mamba_extra_buffer = True
    rows.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((5, 2), dtype=torch.int64)  # as SGLang's
    known = {"device": "cpu", "model_config": model_config(), "spec_algorithm": None}
    target = worker(**known, req_to_token_pool=rows, token_to_kv_pool=pool)
    with DummyBatch(target, requests, context=64, window=8) as dummy:
        batch = dummy.fresh()
    set_mamba_track_indices_from_reqs(batch)
    assert batch.mamba_track_indices.tolist() == [0] * requests
    rows.enable_mamba_extra_buffer = False
    assert dummy.fresh().reqs == []


def test_slots_have_rows_in_a_pool_of_windows():
    """Each another one, as far as there are some; nothing of it stays."""
    pool, rows = partly(SWAKVPool, size=50, size_swa=20), table(3, 30)
    translation = torch.cat([torch.zeros(51, dtype=torch.int64), torch.tensor([-1])])
    pool.register_mapping(translation)
    target = worker(device="cpu", token_to_kv_pool=pool, req_to_token_pool=rows)
    with DummyBatch(target, requests=2, context=10, window=4):
        found = translation[rows.req_to_token[:2, :14].long()]
        assert len(found.unique()) == 20 and int(found.min()) == 1 and int(found.max()) == 20
    assert translation.tolist() == [0] * 51 + [-1]


def again(temperature):
    return request(rid="again", temperature=temperature)


def test_a_request_id_that_is_used_again_is_another_request():
    last = CachedByBatch(lambda reqs: [req.sampling_params.temperature for req in reqs])
    assert last.read([again(3.0)]) == [3.0]
    assert last.read([again(2.0)]) == [2.0]


def test_the_same_requests_are_read_once():
    made = []
    last = CachedByBatch(lambda reqs: made.append(list(reqs)))
    first, second = again(1.0), again(1.0)
    for reqs in ([first, second], [first, second], [second, first], [second]):
        last.read(reqs)
    assert made == [[first, second], [second, first], [second]]


ROWS = torch.tensor([3, 1])


@pytest.fixture
def no_hidden_states():
    """SGLang asks the arguments of a server whether these are relayed."""
    with get_context().override_server_args():
        yield


@pytest.fixture
def no_relay():
    """Buffers that one test offers are not adopted by the map of another."""
    yield
    offer_future_relay_buffers(None)


def future_map():
    made = FutureMap("cpu", SpeculativeAlgorithm.DFLASH, table(4, 8), needs_cpu_seq_lens=False)
    made.output_tokens_buf.zero_()
    made.new_seq_lens_buf.zero_()
    return made


def accepted_tokens(lens, tokens):
    return AcceptResult(torch.zeros(2), torch.tensor(tokens), torch.zeros(2, 3), torch.tensor(lens))


def relayed(made, outcome):
    """Lengths and tokens of all rows, after a step that had this outcome."""
    made.publish(ROWS, outcome.new_seq_lens)
    state = DSparkDraftInput(outcome.bonus_tokens, outcome.new_seq_lens)
    made.stash(ROWS, RelayPayload.from_draft_input(state))
    return made.new_seq_lens_buf.tolist(), made.output_tokens_buf.tolist()


@pytest.mark.usefixtures("no_hidden_states", "no_relay")
@pytest.mark.parametrize("with_relay", [True, False])
def test_what_no_graph_has_written_is_written(with_relay):
    if with_relay:
        Relay(5, CPU)
    made = future_map()
    assert relayed(made, accepted_tokens([7, 9], [70, 90])) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
    assert made.publish_ready is not None


@pytest.mark.usefixtures("no_hidden_states", "no_relay")
def test_what_a_graph_has_written_is_there():
    relay = Relay(5, CPU)
    made, outcome = future_map(), accepted_tokens([7, 9], [70, 90])
    for _ in range(2):  # replays have the same tensors
        relay.write(ROWS, outcome)
        relay.was_written(outcome)
        # The next replay overwrites them, and the map must not read them.
        kept = outcome.new_seq_lens.clone(), outcome.bonus_tokens.clone()
        outcome.new_seq_lens.fill_(-1)
        outcome.bonus_tokens.fill_(-1)
        assert relayed(made, outcome) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
        outcome.new_seq_lens.copy_(kept[0])
        outcome.bonus_tokens.copy_(kept[1])
    assert made.publish_ready is not None
    # Another step's, with the same values, are not the graph's.
    assert relayed(made, accepted_tokens([-1, -1], [-1, -1])) == ([0, -1, 0, -1, 0], [0, -1, 0, -1, 0])
