"""Captured verifications tell the target of their padding."""

import pytest
import torch
from dspark_kernels import RoundKeys, SamplingBatch, VerifyRows
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_context import get_forward_context
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang_objects import model_config, partly, runner

from sglang_dspark.engine.graphs import copy_logits, static_verify
from sglang_dspark.step.state import DecodeBatch, VerifyPlan

ROWS, REQUESTS = 8, 3


def runner_of(forward, pool=None):
    """A runner of a model whose forward this is."""
    model = partly(Qwen3ForCausalLM, forward=forward)
    known = {"model_config": model_config(), "attn_backend": None, "spec_algorithm": None}
    return runner(model=model, token_to_kv_pool=pool, **known)


def buffers():
    """A tier of 8 rows and 3 request slots."""
    zeros = torch.zeros(REQUESTS, dtype=torch.int64)
    keys = RoundKeys(0, 0, zeros, zeros)
    step = DecodeBatch(
        zeros, zeros, zeros, zeros.view(1, -1), SamplingBatch.by_temperature(REQUESTS, None, "cpu"), keys
    )
    return step, VerifyPlan.of(VerifyRows.empty(REQUESTS, ROWS, torch.device("cpu")), width=4)


@pytest.mark.parametrize(("buffered", "cap"), [(True, None), (False, None), (False, 30.0)])
def test_without_a_buffer_logits_keep_their_dtype(buffered, cap):
    """But for those that are capped. Padding of the vocabulary is cut off, and other forwards get float32 as before."""
    logits = torch.randn(ROWS, 6).bfloat16()
    processor = partly(LogitsProcessor, vocab_size=5, final_logit_softcapping=cap)

    def copied(buffer):
        metadata = partly(LogitsMetadata, next_token_logits_buffer=buffer)
        return copy_logits(LogitsProcessor._copy_logits_to_buffer, processor, logits, metadata)

    def forward(input_ids, positions, batch):
        return LogitsProcessorOutput(next_token_logits=copied(batch.next_token_logits_buffer))

    buffer = torch.zeros(ROWS, 5) if buffered else None
    run = static_verify(runner_of(forward), *buffers(), buffer)
    found = run().logits_output.next_token_logits
    assert found.dtype == (torch.float32 if buffered or cap else torch.bfloat16)
    assert torch.equal(found.float(), logits[:, :5].float())
    assert not buffered or found is buffer
    assert copied(None).dtype == torch.float32


def test_every_replay_translates_its_slots():
    """For layers with a window, whose pool gives other rows to the same slots as time goes by."""
    seen = []

    def forward(input_ids, positions, batch):
        seen.append(batch.spec_info.slots_of_windows.tolist())
        return LogitsProcessorOutput(next_token_logits=None)

    pool, translation = partly(SWAKVPool), torch.arange(100) % 7
    pool.register_mapping(translation)
    step, plan = buffers()
    run = static_verify(runner_of(forward, pool), step, plan, torch.zeros(ROWS, 5))
    for slots in (torch.arange(ROWS), 50 - torch.arange(ROWS)):
        plan.slots.copy_(slots)
        run()
    translation.add_(1)
    run()
    assert seen == [[0, 1, 2, 3, 4, 5, 6, 0], [1, 0, 6, 5, 4, 3, 2, 1], [2, 1, 7, 6, 5, 4, 3, 2]]


def test_the_number_of_real_rows_is_known_on_the_device():
    """A replay reads it again: routing of experts, for one, leaves out the rows behind it."""
    seen = []

    def forward(input_ids, positions, batch):
        assert len(input_ids) == ROWS
        # Where routing asks; the answer is the batch's, if no ranks share out the rows.
        assert get_forward_context().moe_num_token_non_padded.__self__ is batch
        seen.append((int(batch.num_token_non_padded), batch.num_token_non_padded.data_ptr()))
        return LogitsProcessorOutput(next_token_logits=None)

    step, plan = buffers()
    run = static_verify(runner_of(forward), step, plan, torch.zeros(ROWS, 5))
    for real in (0, 5, 8, 1):
        plan.indptr[-1] = real
        run()
    assert [number for number, _ in seen] == [0, 5, 8, 1]
    assert len({place for _, place in seen}) == 1


def test_features_prepare_every_replay_before_the_forward():
    seen = []

    def forward(input_ids, positions, batch):
        seen.append(batch.mrope_positions.tolist())
        return LogitsProcessorOutput(next_token_logits=None)

    class Doubled:
        def prepare(self, plan, forward_batch):
            forward_batch.mrope_positions = 2 * plan.positions[:2]

    step, plan = buffers()
    plan.positions.zero_()
    run = static_verify(runner_of(forward), step, plan, torch.zeros(ROWS, 5), [Doubled()])
    for first in (3, 4):
        plan.positions[0] = first
        run()
    assert seen == [[6, 0], [8, 0]]
