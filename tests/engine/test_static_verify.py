"""What a captured verification tells the target of its padding."""

from types import SimpleNamespace

import torch
from dspark_kernels import RoundKeys, SamplingRows, VerifyRows
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dspark.engine.forward.graphs import static_verify
from sglang_dspark.step.state import DecodeBatch, VerifyPlan

ROWS, REQUESTS = 8, 3


def buffers():
    """A tier of 8 rows and 3 request slots."""
    zeros = torch.zeros(REQUESTS, dtype=torch.int64)
    keys = RoundKeys(0, 0, zeros, zeros)
    step = DecodeBatch(zeros, zeros, zeros, zeros.view(1, -1), SamplingRows.by_temperature(REQUESTS, None, "cpu"), keys)
    return step, VerifyPlan.of(VerifyRows.empty(REQUESTS, ROWS, torch.device("cpu")), width=4)


def test_the_number_of_real_rows_is_known_on_the_device():
    """A replay reads it anew: routing of experts, for one, leaves out the rows behind it."""
    seen = []

    def forward(input_ids, positions, batch):
        assert len(input_ids) == ROWS
        seen.append((int(batch.num_token_non_padded), batch.num_token_non_padded.data_ptr()))
        return LogitsProcessorOutput(next_token_logits=None)

    config = SimpleNamespace(model_is_mrope=False)
    model = SimpleNamespace(forward=forward)
    runner = SimpleNamespace(model=model, model_config=config, attn_backend=None, spec_algorithm=None)
    step, plan = buffers()
    run = static_verify(runner, step, plan, torch.zeros(ROWS, 5), None)
    for real in (0, 5, 8, 1):
        plan.indptr[-1] = real
        run()
    assert [number for number, _ in seen] == [0, 5, 8, 1]
    assert len({place for _, place in seen}) == 1
