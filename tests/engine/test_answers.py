"""Tests of what answers hold: log-probabilities, ends of texts, and what a grammar allows, along several tokens.

Requests that have ended are no reason to refuse new weights.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from letter_tokenizers import EOS, THINK_END, VOCAB, Backends, after
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_objects import batch, partly, request

from sglang_dspark.engine.answers import Ends, Logprobs, let_first_end_count
from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.engine.logits_processing import grammar_masks
from sglang_dspark.engine.part import DrawnTokens, Part
from sglang_dspark.engine.scheduler import observe_results, take_out_ended
from sglang_dspark.features.short_prompts import PrefillAndDecodeResult
from sglang_dspark.worker.worker import DSparkWorker

TOKENS, WIDTH = 11, 8
UNASKED = batch()


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("requests", [3, 70])
def test_every_request_gets_those_of_its_own_rows(monkeypatch, requests, original):
    """However many there are; of original logits if SGLang's variable says so."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", str(original))
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    logits = torch.randn(int(indptr[-1]), TOKENS, generator=generator)
    tokens = torch.randint(TOKENS, (requests, WIDTH), generator=generator)
    tokens[torch.arange(WIDTH) >= lens[:, None]] = -1
    temperatures = 0.5 + torch.rand(requests, generator=generator)
    asked = [number % 3 != 1 for number in range(requests)]
    given_batch = batch(
        *(partly(Req, return_logprob=wanted) for wanted in asked),
        return_logprob=True,
        top_logprobs_nums=[2 * wanted for wanted in asked],
        token_ids_logprobs=[[number % TOKENS, 7] if wanted else None for number, wanted in enumerate(asked)],
    )
    given = LogitsProcessorOutput(next_token_logits=logits)
    output = Logprobs().tokens_drawn(given_batch, given, DrawnTokens(indptr, tokens, temperatures))
    assert given.next_token_logprobs is None and Logprobs().tokens_drawn(UNASKED, given, None) is given
    for number in range(requests):
        for slot in range(int(lens[number])):
            entry, scale = number * WIDTH + slot, 1.0 if original else float(temperatures[number])
            expected = (logits[int(indptr[number]) + slot] / scale).log_softmax(-1)
            best = expected.topk(2 * asked[number])
            named = given_batch.token_ids_logprobs[number] or []
            chosen = expected[tokens[number, slot]] if asked[number] else torch.tensor(0.0)
            torch.testing.assert_close(output.next_token_logprobs[number, slot], chosen)
            torch.testing.assert_close(output.next_token_top_logprobs_val[entry], best.values)
            assert output.next_token_top_logprobs_idx[entry].tolist() == best.indices.tolist()
            torch.testing.assert_close(output.next_token_token_ids_logprobs_val[entry], expected[named])
            assert output.next_token_token_ids_logprobs_idx[entry] == named


def test_entries_of_tokens_that_were_not_committed_are_empty():
    """SGLang makes Python lists of every entry; a rejected draft's may have the whole vocabulary."""

    def entries():
        return [torch.arange(4) + 10 * slot for slot in range(6)]

    output = LogitsProcessorOutput(next_token_logits=None)
    output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = entries(), entries()
    output.next_token_token_ids_logprobs_val = [*entries()[:3], *[torch.empty(0)] * 3]
    observed = []
    ours = partly(DSparkWorker, observe=lambda *told: observed.append(told), parts=[Part(), Logprobs()])
    processor = partly(SchedulerBatchResultProcessor, model_worker=ours)
    result = DSparkBatchResult(next_token_ids=torch.empty(0), accept_lens=torch.empty(0), logits_output=output)
    ended = batch(*[partly(Req, finished_reason="of some kind")] * 2, return_logprob=True)
    assert observe_results(lambda *told: [[5], [6, 7, 8]], processor, result, ended) == [[5], [6, 7, 8]]
    assert observed == [(result, ended)]
    for lists in (output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx):
        assert [entry.tolist() for entry in lists] == [
            *([0, 1, 2, 3], [], []),
            *([30, 31, 32, 33], [40, 41, 42, 43], [50, 51, 52, 53]),
        ]
    assert [len(entry) for entry in output.next_token_token_ids_logprobs_val] == [4, 0, 0, 0, 0, 0]


def made(state):
    req = request()
    req.finished_reason = FINISH_LENGTH(1) if state == "ended" else None
    req.to_finish = FINISH_ABORT() if state == "aborted" else None
    return req


def end_aborted(of_step, result):
    for req in of_step.reqs:
        req.finished_reason, req.to_finish = req.finished_reason or req.to_finish, None


def test_requests_that_ran_with_prompts_are_known_to_end():
    running = batch(made("aborted"), model_config=SimpleNamespace(is_encoder_decoder=False), batch_is_full=True)
    result = PrefillAndDecodeResult(running=(batch(*running.reqs), "result"))
    scheduler = SimpleNamespace(
        running_batch=running,
        last_batch=None,
        enable_overlap=True,
        chunked_req=None,
        process_batch_result=lambda of_prompts, result: end_aborted(*result.running),
        result_queue=deque([(batch(), result)]),
    )
    take_out_ended(scheduler)
    assert (running.reqs, len(scheduler.result_queue)) == ([], 0)


@pytest.mark.parametrize(
    ("states", "overlap", "chunked", "taken"),
    [
        (["ended"], True, False, True),
        (["ended", "aborted"], True, False, True),
        (["ended"], False, False, True),
        (["ended", "aborted"], False, False, False),  # the step that ends it is still to come
        (["ended", "running"], True, False, False),
        (["ended"], True, True, False),  # a prompt that is encoded in part
    ],
)
def test_requests_that_have_ended_are_taken_out(states, overlap, chunked, taken):
    running = batch(*map(made, states), model_config=SimpleNamespace(is_encoder_decoder=False), batch_is_full=True)
    queue = deque([(batch(*running.reqs), "result")]) if overlap else None
    scheduler = SimpleNamespace(
        running_batch=running,
        last_batch=running,
        enable_overlap=overlap,
        chunked_req=request() if chunked else None,
        process_batch_result=end_aborted,
        **({"result_queue": queue} if overlap else {}),
    )
    take_out_ended(scheduler)
    assert (running.reqs == [], scheduler.last_batch is None, running.batch_is_full) == (taken, taken, not taken)
    assert not overlap or len(queue) == (0 if taken else 1)


LETTERS = "abcdefgh"  # of tokens 0 to 7
END = 7
TOKENIZER = SimpleNamespace(
    decode=lambda ids: "".join(LETTERS[i] for i in ids),
    encode=lambda text, **_: [LETTERS.index(letter) for letter in text],
    eos_token_id=END,
    additional_stop_token_ids=None,
)


class Grammar:
    """Complete after so many tokens, all of which it has read."""

    def __init__(self, length):
        self.length, self.seen = length, 0

    def read(self, tokens):
        """Those of ``tokens`` that still belong to it."""
        read = tokens[: self.length - self.seen]
        self.seen += len(read)
        return read

    def is_terminated(self):
        return self.seen >= self.length


def stopped_request(max_new_tokens, grammar_length, **stops):
    parameters = SamplingParams(max_new_tokens=max_new_tokens, **stops)
    parameters.normalize(TOKENIZER)
    req = Req("r", "", [0], parameters, vocab_size=len(LETTERS))
    req.tokenizer = TOKENIZER
    req.grammar = None if grammar_length is None else Grammar(grammar_length)
    return req


def end(req, runs, look=lambda reqs, runs: None, aborted=None):
    """Return the text that comes in ``runs`` as it is served, and why it ended.

    Args:
        look: called before each run.
        aborted: the run that is under way when the request is aborted.
    """
    for number, tokens in enumerate(runs):
        if number == aborted:
            req.to_finish = FINISH_ABORT()
        run = tokens if req.grammar is None else req.grammar.read(tokens)
        look([req], [run])
        req.output_ids.extend(run)
        before = len(req.output_ids)
        req.update_finish_state(len(run))
        assert len(req.output_ids) == before
        if req.finished():
            return list(req.output_ids_through_stop), req.finished_reason.to_json()
    return list(req.output_ids), None


@settings(max_examples=500)
@given(
    runs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=4),
    max_new_tokens=st.integers(1, 20),
    grammar_length=st.none() | st.integers(1, 12),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2),
    stop_regex=st.sampled_from([[], ["b$"], ["[cd]e"], ["^a"]]),
)
@example([[1, END, 2]], 3, None, [], [], [])
@example([[END, 1, 2]], 9, None, [], ["bc"], [])
@example([[1, 2]], 9, None, [], [], ["b$"])
@example([[1, 2, 3]], 9, 3, [1], [], [])
@example([[1, 2, 3]], 9, 3, [], ["bcd"], [])
@example([[1, 2, 3]], 9, None, [], ["cd", "bc"], [])
def test_the_first_end_counts(runs, max_new_tokens, grammar_length, stop_token_ids, stop, stop_regex):
    wanted = {"stop_token_ids": stop_token_ids, "stop": stop, "stop_regex": stop_regex}
    one_by_one = [[token] for run in runs for token in run]
    expected = end(stopped_request(max_new_tokens, grammar_length, **wanted), one_by_one)
    assert end(stopped_request(max_new_tokens, grammar_length, **wanted), runs, let_first_end_count) == expected


@given(
    before=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=3),
    run=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    max_new_tokens=st.integers(1, 12),
    stops=st.sampled_from([{}, {"stop": ["b"]}, {"stop_regex": ["b$"]}, {"stop_token_ids": [2]}]),
)
@example([[1, 3, 4]], [3, 3, 3, 3], 5, {})
@example([[3]], [3, 1, 3], 9, {"stop": ["b"]})
@example([[3]], [3, END, 3], 9, {})
def test_an_abort_passes_no_other_end(before, run, max_new_tokens, stops):
    whole, one_by_one = stopped_request(max_new_tokens, None, **stops), stopped_request(max_new_tokens, None, **stops)
    tokens = [[token] for one in [*before, run] for token in one]
    expected = end(one_by_one, tokens, aborted=len(tokens) - len(run))
    assert end(whole, [*before, run], let_first_end_count, aborted=len(before)) == expected


def test_requests_whose_tokens_are_dropped_are_left_alone():
    """Under overlap a request that has ended takes part in one more step. What holds itself is freed late."""
    ended, retracted, running = (stopped_request(3, None, stop=["a"]) for _ in range(3))
    ended.finished_reason, retracted.is_retracted = "of some kind", True
    let_first_end_count([ended, retracted, running], [[1] * 3] * 3)
    assert ["update_finish_state" in vars(req) for req in (ended, retracted, running)] == [False, False, True]


def test_requests_without_stop_strings_are_left_to_sglang():
    reqs = [
        stopped_request(9, 5, stop_token_ids=[3]),
        stopped_request(9, None),
        *(stopped_request(9, None, stop=["ab"]) for _ in range(2)),
    ]
    let_first_end_count(reqs, [[1] * 8, [1] * 9, [1], [1, 2]])
    assert ["update_finish_state" in vars(req) for req in reqs] == [False, False, False, True]


@pytest.mark.parametrize(("counted", "expected"), [(3, 3), (4, 4), (9, 4)])
def test_reasoning_has_at_most_the_tokens_of_the_text(counted, expected):
    req = stopped_request(9, None)
    req.output_ids.extend([5] * 4)
    req.reasoning_tokens = counted
    Ends().request_ended(req)
    assert req.reasoning_tokens == expected


REGEX = "[ab]{2}(c|d)+e?"


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return Backends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(backends: Backends) -> Any:
    return backends.tokenizer


@pytest.fixture(scope="module")
def grammars(backends: Backends) -> dict[str, Any]:
    """A grammar of each engine at its start; to be copied."""
    return {
        "xgrammar": backends.xgrammar.dispatch_regex(REGEX),
        "reasoner": backends.reasoner(REGEX),
        "llguidance": backends.llguidance.dispatch_regex(REGEX),
    }


def mask_of(grammar: Any) -> list[int]:
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask[0].tolist()


# Committed text, drafts, and how many rows the grammar reaches: the last one judges the draft that it forbids.
WALKS = [("", "abcd", 5), ("", "", 1), ("a", "bcx", 3), ("ab", "xc", 1), ("abc", "de<eos>a", 3), ("abcde", "<eos>", 1)]


@pytest.mark.parametrize(("committed", "drafted", "rows"), WALKS)
@pytest.mark.parametrize("engine", ["xgrammar", "llguidance", "reasoner"])
def test_masks_along_the_drafts(tokenizer, grammars, engine, committed, drafted, rows):
    before = [THINK_END] if engine == "reasoner" else []
    before += tokenizer(committed).input_ids
    drafts = tokenizer(drafted).input_ids
    reqs = [request(grammar=g) for g in (None, after(grammars[engine], before), None)]
    for _ in range(2):  # the second walk starts where the first one did
        found, masks = grammar_masks(reqs, [[5, 6], [7, *drafts], [8]], VOCAB)
        assert found == list(range(2, 2 + rows))
        for row, mask in enumerate(masks.tolist()):
            assert mask == mask_of(after(grammars[engine], [*before, *drafts[:row]]))


def test_a_grammar_without_a_say_masks_nothing(tokenizer, grammars):
    ended = after(grammars["xgrammar"], [*tokenizer("abc").input_ids, EOS])
    finished = after(grammars["xgrammar"], [])
    finished.finished = True
    reqs = [request(grammar=g) for g in (None, ended, finished)]
    assert grammar_masks(reqs, [[1], [1, 2], [1]], VOCAB) == ([], None)


def test_thinking_is_not_masked(tokenizer, grammars):
    """Before the end of its thoughts a reasoning model may write anything; the grammar begins after them."""
    drafts = [*tokenizer("zz").input_ids, THINK_END, *tokenizer("ax").input_ids]
    _, masks = grammar_masks([request(grammar=after(grammars["reasoner"], []))], [[9, *drafts]], VOCAB)
    assert (masks[:3] == -1).all()
    assert len(masks) == 5  # up to the row that judges the x
    for row in (3, 4):
        assert masks[row].tolist() == mask_of(after(grammars["reasoner"], drafts[:row]))


def test_a_grammar_that_fails_ends_its_own_request(tokenizer, backends, grammars):
    """After a draft that begins an endless tail, llguidance meets a limit, and raises whatever it is asked."""
    failing = backends.llguidance.dispatch_ebnf('start: " sat" ("!" | "." tail)\ntail: "a" tail')
    reqs = [request(grammar=failing), request(grammar=grammars["llguidance"].copy())]
    drafts = tokenizer(" sat.a").input_ids
    for _ in range(2):
        rows, masks = grammar_masks(reqs, [[9, *drafts], [9]], VOCAB)
        assert rows == [1 + len(drafts)] and masks.tolist() == [mask_of(grammars["llguidance"].copy())]
    SchedulerBatchResultProcessor._accept_grammar_tokens(
        None, reqs[0], [5]
    )  # as SGLang does with the token of the step
    ended, going_on = (req.to_finish for req in reqs)
    assert going_on is None and ended.status_code == 400
    assert ended.message.startswith("the grammar is too complex: ") and "\n" not in ended.message


def test_a_draft_that_no_tokenizer_knows_is_forbidden(grammars):
    """A model's vocabulary may be padded; llguidance has masks of its tokenizer's."""
    grammar = grammars["llguidance"].copy()
    rows, _ = grammar_masks([request(grammar=grammar)], [[9, VOCAB + 40, 5]], VOCAB + 64)
    assert rows == [0]
