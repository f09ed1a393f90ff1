"""Log-probabilities of a step on their way to SGLang."""

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang_objects import batch, partly

from sglang_dspark.engine.answers import Logprobs
from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.engine.part import DrawnTokens, Part
from sglang_dspark.engine.scheduler import observe_results
from sglang_dspark.worker.worker import DSparkWorker

VOCAB, WIDTH = 11, 8
UNASKED = batch()


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("requests", [3, 70])
def test_every_request_gets_those_of_its_own_rows(monkeypatch, requests, original):
    """However many there are; of original logits if SGLang's variable says so."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", str(original))
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    logits = torch.randn(int(indptr[-1]), VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (requests, WIDTH), generator=generator)
    tokens[torch.arange(WIDTH) >= lens[:, None]] = -1
    temperatures = 0.5 + torch.rand(requests, generator=generator)
    asked = [number % 3 != 1 for number in range(requests)]
    given_batch = batch(
        *(partly(Req, return_logprob=wanted) for wanted in asked),
        return_logprob=True,
        top_logprobs_nums=[2 * wanted for wanted in asked],
        token_ids_logprobs=[[number % VOCAB, 7] if wanted else None for number, wanted in enumerate(asked)],
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
