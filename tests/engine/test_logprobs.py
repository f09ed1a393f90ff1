"""Log-probabilities of a step on their way to SGLang."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dspark.engine.scheduler.hook_handlers import observe_results


def test_entries_of_tokens_that_were_not_committed_are_empty():
    """SGLang makes Python lists of every entry; a rejected draft's may have the whole vocabulary."""

    def entries():
        return [torch.arange(4) + 10 * slot for slot in range(6)]

    output = LogitsProcessorOutput(next_token_logits=None)
    output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = entries(), entries()
    output.next_token_token_ids_logprobs_val = [*entries()[:3], *[torch.empty(0)] * 3]
    observed = []
    processor = SimpleNamespace(model_worker=SimpleNamespace(observe=lambda *told: observed.append(told)))
    result = SimpleNamespace(read_copy=lambda: None, logits_output=output)
    batch = SimpleNamespace(return_logprob=True, reqs=[SimpleNamespace(finished=lambda: True)] * 2)
    assert observe_results(lambda *told: [[5], [6, 7, 8]], processor, result, batch) == [[5], [6, 7, 8]]
    assert observed == [(result, batch)]
    for lists in (output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx):
        assert [entry.tolist() for entry in lists] == [
            *([0, 1, 2, 3], [], []),
            *([30, 31, 32, 33], [40, 41, 42, 43], [50, 51, 52, 53]),
        ]
    assert [len(entry) for entry in output.next_token_token_ids_logprobs_val] == [4, 0, 0, 0, 0, 0]
