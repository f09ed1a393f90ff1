"""Adapters in verification: SGLang's own kernels over ragged rows, and what replays read."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang_objects import batch, forward, partly, worker

from sglang_dspark.engine.verify import DSparkVerifyInput
from sglang_dspark.errors import UnservedError
from sglang_dspark.features import adapters
from sglang_dspark.features.adapters import AdapterChoice, Adapters, CapturedAdapters, lay_out, segment_bounds

PLACES, RANK, INPUTS, OUTPUTS = 3, 8, 32, (24, 16, 16)
RANKS, SCALINGS = [0, 8, 4], [0.0, 2.0, 0.5]
LENGTHS = (1, 5, 3, 20, 0, 1)  # rows of each request; more than a segment's, and an empty slot
PADDING = 6


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_segments_are_the_requests_in_pieces(lengths):
    width = max(*lengths, 1)
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    bounds = segment_bounds(indptr, width)
    pieces = bounds.diff().view(len(lengths), -1)
    assert pieces.sum(1).tolist() == lengths
    assert bounds[0] == 0 and pieces.min() >= 0 and pieces.max() <= 16
    assert pieces.shape[1] == -(-width // 16)


def expected(x, a, b, slices, base, buffers):
    """Each row by its own: base + scaling * B (A x), slice by slice."""
    rows = base.clone()
    requests = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).tolist()
    bounds = torch.tensor([0, *slices]).cumsum(0).tolist()
    for row, request in enumerate(requests):
        place = buffers[request]
        rank = RANKS[place]
        for i, (begin, end) in enumerate(pairwise(bounds)):
            shrunk = a[place, i * rank : (i + 1) * rank] @ x[row]
            rows[row, begin:end] += SCALINGS[place] * (b[place, begin:end, :rank] @ shrunk)
    return rows


@pytest.mark.parametrize("name", ["csgmv", "triton", "torch_native"])
@pytest.mark.parametrize("slices", [OUTPUTS, OUTPUTS[:1], (24, 24)], ids=["qkv", "one", "gate-up"])
def test_every_row_gets_the_adapter_of_its_request(name, slices, monkeypatch):
    """And rows of no request get none. The kernels are SGLang's, interpreted where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() and name != "torch_native" else "cpu")
    tuned = "sglang.kernels.ops.lora.dense.lora_tuning_config.get_device_name"
    monkeypatch.setattr(tuned, lambda: "of no tuned sizes")
    noise = torch.Generator().manual_seed(1)
    rows, num = sum(LENGTHS) + PADDING, len(slices)
    x = torch.randn(rows, INPUTS, generator=noise)
    a = torch.randn(PLACES, num * RANK, INPUTS, generator=noise)
    b = torch.randn(PLACES, sum(slices), RANK, generator=noise)
    base = torch.randn(rows, sum(slices), generator=noise)
    buffers = [1, 2, 0, 2, 0, 1]
    with get_context().override_server_args(max_lora_chunk_size=16):
        backend = get_backend_from_name(name)(PLACES, device, server_args=None)
    choice = AdapterChoice.of((buffers, RANKS, SCALINGS), device)
    indptr = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    lay_out(backend, choice, indptr, max(LENGTHS), rows)
    offsets = torch.tensor([0, *slices], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given = {"output_offset": offsets.to(device), "output_offset_cpu": offsets}
    on_device = (x.to(device), a.to(device), b.to(device))
    result = base.to(device, copy=True)
    if num == 3:
        result = backend.run_qkv_lora(*on_device, max_qkv_out_dim=max(slices), base_output=result, **given)
    elif num == 2:
        result = backend.run_gate_up_lora(*on_device, base_output=result, **given)
    else:
        shrunk = backend.run_lora_a_sgemm(on_device[0], on_device[1])
        result = backend.run_lora_b_sgemm(shrunk, on_device[2], base_output=result, **given)
    torch.testing.assert_close(result.cpu(), expected(x, a, b, slices, base, buffers), rtol=1e-2, atol=2e-2)
    assert torch.equal(result.cpu()[sum(LENGTHS) :], base[sum(LENGTHS) :])


@pytest.fixture
def manager():
    """SGLang's, with two adapters in its pool; ``fetched`` is what it was asked to fetch."""
    loras = {
        name: partly(LoRAAdapter, config=partly(LoRAConfig, r=r), scaling=scaling)
        for name, r, scaling in zip(("red", "green"), RANKS[1:], SCALINGS[1:], strict=True)
    }
    backend, fetched = get_backend_from_name("triton")(PLACES, "cpu"), []
    made = partly(LoRAManager, max_loras_per_batch=PLACES, loras=loras, lora_backend=backend, fetched=fetched)
    made.memory_pool = partly(LoRAMemoryPool, uid_to_buffer_id={None: 0, "red": 1, "green": 2})
    made.fetch_new_loras = fetched.append
    return made


def batch_of(*names):
    return batch(*(partly(Req, lora_id=name) for name in names))


def plan_of(*lengths, rows, width=4):
    return SimpleNamespace(
        indptr=torch.tensor([0, *lengths]).cumsum(0), width=width, input_ids=torch.zeros(rows, dtype=torch.int64)
    )


def test_a_replay_reads_what_was_staged_for_it(manager):
    """At the addresses that were captured; what prompts have displaced from the pool is fetched again every time."""
    captured = CapturedAdapters(manager, 4, "cpu")
    plan = plan_of(1, 3, 0, rows=8)
    captured.prepare(plan, None)
    info = manager.lora_backend.batch_info
    assert info.weight_indices.tolist() == [0, 0, 0] and info.lora_ranks.tolist() == [0, 0, 0]
    captured.stage(batch_of("green", None))
    assert info.lora_ranks.tolist() == [0, 0, 4] and info.scalings.tolist() == [0.0, 0.0, 0.5]
    captured.prepare(plan, None)
    assert manager.lora_backend.batch_info.weight_indices.tolist() == [2, 0, 0]
    manager.memory_pool.uid_to_buffer_id = {None: 0, "green": 1, "red": 2}
    captured.stage(batch_of("green", "red"))
    assert info.lora_ranks.tolist() == [0, 4, 8]
    captured.prepare(plan, None)
    assert manager.lora_backend.batch_info.weight_indices.tolist() == [1, 2, 0]
    assert manager.lora_backend.batch_info.lora_ranks.data_ptr() == info.lora_ranks.data_ptr()
    captured.stage(None)
    assert info.lora_ranks.tolist() == [0, 0, 0]
    assert manager.fetched == [{"green", None}, {"green", "red"}, set()]


def test_what_does_not_change_is_not_copied(manager):
    captured = CapturedAdapters(manager, 4, "cpu")
    captured.stage(batch_of("red"))
    captured._buffers.ranks.fill_(-1)  # by nobody but this test
    captured.stage(batch_of("red"))
    assert captured._buffers.ranks.tolist() == [-1, -1, -1]
    captured.stage(batch_of("red", "red"))
    assert captured._buffers.ranks.tolist() == [0, 8, 0]


def test_a_verification_launch_by_launch_is_laid_out_by_its_rows(manager):
    laid_out = []
    manager.lora_backend.lm_head_batch_info = manager.lora_backend.sgemm_batch_info = "of a prompt"
    layout = DSparkVerifyInput(
        draft_token=torch.zeros(4), positions=torch.zeros(4), draft_token_num=4, indptr=torch.tensor([0, 3, 4])
    )
    given = forward(spec_info=layout, lora_ids=["red", None], input_ids=torch.zeros(4, dtype=torch.int64))
    adapters.prepare_verification(lambda *args: laid_out.append(args), manager, given)
    assert laid_out == []
    info = manager.lora_backend.batch_info
    assert info.seg_indptr.tolist() == [0, 3, 4] and info.weight_indices.tolist() == [1, 0]
    assert manager.lora_backend.lm_head_batch_info is manager.lora_backend.sgemm_batch_info is None
    given.forward_mode, given.spec_info = ForwardMode.EXTEND, None
    adapters.prepare_verification(lambda *args: laid_out.append(args), manager, given)
    assert laid_out == [(manager, given)]


def test_adapters_of_experts_are_refused(manager):
    assert isinstance(
        Adapters.of(worker(lora_manager=manager, device="cpu")).captured(requests=2, rows=4), CapturedAdapters
    )
    assert Adapters.of(worker(lora_manager=None)) is None
    manager.lora_backend.is_moe_lora = True
    with pytest.raises(UnservedError, match="adapters of experts"):
        Adapters.of(worker(lora_manager=manager, device="cpu"))
