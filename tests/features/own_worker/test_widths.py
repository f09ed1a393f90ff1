"""The widths of verifications, without a server: which one a step takes, and what is verified."""

from types import SimpleNamespace

import pytest
import torch
from made_schedule import schedule
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang_objects import ONE_RANK, model_config, partly, runner, server_args

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.features.own_worker import lengths
from sglang_dspark.features.own_worker import widths as module
from sglang_dspark.features.own_worker.step import ScheduledStep
from sglang_dspark.features.own_worker.widths import Width, Widths, narrower_widths
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.selection import FixedLength, TopK

ALONE = Agreement(ONE_RANK)
FORECAST = schedule(gamma=7).forecast


@pytest.fixture
def worker(monkeypatch):
    """A worker of blocks of seven drafts whose forwards are captured; its narrower widths take a gigabyte each."""
    graphs = partly(DecodeCudaGraphRunner, capture_bs=[1, 2])
    target = runner(attn_backend="whole", decode_cuda_graph_runner=graphs)
    found = SimpleNamespace(device="cuda", gpu_id=0, free=9.0, model_runner=target)
    found.verify_num_draft_tokens, found._verify_executor = 8, "whole"

    def narrowed(self, worker, rows):
        worker.free -= 1.0
        return Width(rows, f"{rows} rows", f"{rows} rows", SimpleNamespace())

    monkeypatch.setattr(Width, "narrowed", narrowed)
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None)))
    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *args, **kwargs: found.free)
    return found


def proposal(bs, drafts=7):
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal

    tokens = torch.arange(bs * drafts).view(bs, drafts)
    block = DraftBlockResult(
        tokens, torch.zeros(bs, drafts, 5), torch.zeros(bs, dtype=torch.bool), torch.ones(bs), greedy_draft=False
    )
    return DraftProposal(tokens, block, folded=True, verify_ids=tokens)


def taken(rows, decision, bs=3):
    """The proposal that is verified, the lengths and the layout that cuts, and the rows computed."""
    step = ScheduledStep(decision, bs, rows)
    told = step.propose(lambda: proposal(bs), torch.zeros(bs, dtype=torch.int64), None)
    layout = step.lay_out(FORECAST, ALONE, range(bs))
    return told, step.verify_lens.tolist(), None if layout is None else layout.verify_lens.tolist(), step.num_rows


def test_each_width_verifies_half_the_drafts_of_the_next():
    assert narrower_widths(8) == [1, 2, 4]
    assert narrower_widths(17) == [1, 2, 3, 5, 9]
    assert narrower_widths(2) == [1]


def test_widths_and_their_memory(worker):
    rows = Widths(worker, ALONE, narrow=True)
    assert (rows.window, rows.lengths, rows.memory_gb) == (8, (1, 3, 7), 3.0)
    assert rows.tiers == ()
    assert "[1, 2, 4, 8]" in rows.digest


def test_where_no_fewer_rows_may_be_verified_blocks_are_whole(worker):
    assert Widths(worker, ALONE, narrow=False).lengths == (7,)
    assert worker.free == 9.0


@pytest.mark.parametrize(
    ("backend", "recurrent", "sparse", "narrow"),
    [
        ("triton", None, False, True),
        ("dsa", None, False, True),
        ("dsv4", None, False, False),
        ("unheard_of", None, False, False),
        ("fa3", object(), False, False),
        ("fa3", None, True, False),
    ],
)
def test_layers_with_states_of_each_draft_verify_whole_blocks(backend, recurrent, sparse, narrow, monkeypatch):
    """SGLang's kernels address them by the rows of the verification, and its commit by those of the block."""
    found = {"resolved_view": None, "mambaish_config": recurrent, "is_minimax_sparse": sparse}
    for name, value in {**found, "attention_backends_of": ("fa3", backend)}.items():
        monkeypatch.setattr(lengths, name, lambda *_, value=value: value)
    assert lengths.has_narrow_rows(server_args(), model_config()) is narrow


def test_what_has_no_memory_is_left_out(worker, caplog):
    worker.free = 1.5
    assert Widths(worker, ALONE, narrow=True).lengths == (7,)
    assert "--mem-fraction-static" in caplog.text


@pytest.mark.parametrize(("drafts", "width"), [(1, 2), (2, 4), (3, 4), (4, 8), (7, 8)])
def test_a_step_takes_the_narrowest_width_with_room(worker, drafts, width):
    rows = Widths(worker, ALONE, narrow=True)
    told, lens, cut, num_rows = taken(rows, StepDecision(drafts, FixedLength(), with_confidence=False))
    assert worker.verify_num_draft_tokens == width
    assert told.draft_block.draft_tokens.shape == (3, width - 1)
    assert told.draft_block.corrected_logits.shape == (3, width - 1, 5)
    assert not told.draft_block.greedy_draft
    assert (lens, num_rows) == ([drafts] * 3, 3 * width)
    assert cut == (None if drafts == width - 1 else [1 + drafts] * 3)
    rows.release()
    assert (worker.verify_num_draft_tokens, worker._verify_executor) == (8, "whole")
    assert worker.model_runner.attn_backend == "whole"


def test_what_a_graph_accepts_is_taken_of_whole_blocks_alone(worker):
    rows = Widths(worker, ALONE, narrow=True)
    whole = StepDecision(7, FixedLength(), with_confidence=False)
    assert taken(rows, whole)[0].folded
    assert not taken(rows, whole.within(RequestLimits((7, 7, 6))))[0].folded
    assert not taken(rows, StepDecision(3, FixedLength(), with_confidence=False))[0].folded


def test_limits_cut_what_is_accepted(worker):
    rows = Widths(worker, ALONE, narrow=True)
    decision = StepDecision(7, TopK(21), with_confidence=False).within(RequestLimits((0, 3, 1)))
    _, lens, cut, num_rows = taken(rows, decision)
    assert (lens, cut, num_rows) == ([0, 3, 1], [1, 4, 2], 12)


def test_a_plain_step_has_nothing_to_divide_by(worker):
    """SGLang turns logits of the drafter into probabilities for requests that are sampled."""
    rows, sampling = Widths(worker, ALONE, narrow=True), partly(SamplingBatchInfo, top_ks=torch.tensor([1, 40]))
    step = ScheduledStep(PLAIN, 2, rows)
    block = step.propose(lambda: proposal(2), torch.tensor([4, 5]), sampling).draft_block
    assert (block.draft_tokens.shape, block.greedy_draft, block.corrected_logits) == ((2, 0), True, None)
    assert step.lay_out(FORECAST, ALONE, range(2)) is None
    assert (step.verify_lens.tolist(), step.num_rows) == ([0, 0], 2)


def test_a_plain_step_without_its_width_accepts_no_filler(worker):
    step = ScheduledStep(PLAIN, 2, Widths(worker, ALONE, narrow=False))
    step.propose(lambda: proposal(2), torch.tensor([4, 5]), None)
    assert step.lay_out(FORECAST, ALONE, range(2)).verify_lens.tolist() == [1, 1]
