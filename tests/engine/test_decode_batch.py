"""A decode step out of SGLang's batch: where its tokens stand, and whose noise they are drawn with."""

import torch
from dspark_kernels import SamplingBatch
from sglang_objects import batch, table

from sglang_dspark.engine.batch import read_decode_batch, round_keys
from sglang_dspark.engine.draft_input import DSparkDraftInput


def test_the_first_token_of_a_step_stands_behind_the_anchor():
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
