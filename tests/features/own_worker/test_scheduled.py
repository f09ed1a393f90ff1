"""SGLang's own worker under our schedule, without a server: rows, steps, and what is refused at start-up."""

import os
from types import SimpleNamespace

import launches
import pytest
import torch
from dspark_kernels import StepRequests, kernels_anywhere
from made_schedule import schedule
from sglang.kernels.ops.speculative.dspark import dspark_verify_window
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import build_ragged_verify_window
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang_objects import ONE_RANK, model_config, partly, runner
from triton.runtime.interpreter import InterpretedFunction

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.server import DSparkServer, TargetOnly, attach
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.own_worker import FEATURE, lengths, server
from sglang_dspark.features.own_worker.captured_rows import CapturedRows
from sglang_dspark.features.own_worker.handlers import planned_rows
from sglang_dspark.features.own_worker.server import MODE, ScheduledServer
from sglang_dspark.features.own_worker.step import ScheduledStep
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selected import TopDrafts
from sglang_dspark.step.selection import FixedLength, TopK

CAPTURED = CapturedRows(window=8, tiers=(8, 16, 32), requests=4)
ALONE = Agreement(ONE_RANK)
FORECAST = schedule(gamma=7).forecast


def proposal(logits):
    """Return what the worker drafts: the block's tokens, and its confidences."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal

    bs, gamma = logits.shape
    tokens = torch.arange(bs * gamma).view(bs, gamma)
    block = DraftBlockResult(tokens, None, torch.ones(bs, dtype=torch.bool), torch.ones(bs), greedy_draft=True)
    return DraftProposal(tokens, block, confidence=logits.sigmoid(), confidence_raw=logits)


def requests_of(bs):
    """Requests whose texts have 3, 13, 23, ... tokens, in rows of the table from the last one down."""
    table = 100 * torch.arange(1, bs + 2)[:, None] + torch.arange(100)
    return StepRequests(torch.arange(bs), 3 + 10 * torch.arange(bs), torch.arange(bs).flip(0), table.to(torch.int32))


def laid_out(decision, logits, rows=CAPTURED):
    step, requests = ScheduledStep(decision, len(logits), rows), requests_of(len(logits))
    step.propose(lambda: proposal(logits), requests.anchors, None)
    return step, step.lay_out(FORECAST, ALONE, requests)


def test_rows_are_padded_to_the_next_tier():
    """On the device: nothing of a captured layout is known to the host."""
    given = TopDrafts.of_lengths(torch.tensor([0, 3, 5]), 7), torch.zeros(3, 7, dtype=torch.int64), requests_of(3)
    layout, lens, rows = CAPTURED.lay_out(*given, 11)
    assert (rows, lens.tolist()) == (16, [0, 3, 5])
    assert (layout.graph_num_tokens, layout.verify_lens_cpu) == (16, None)
    assert layout.qo_indptr_device.tolist() == [0, 1, 5, 11]
    assert CAPTURED.lay_out(*given, None)[2] == 32
    assert CapturedRows(window=8).lay_out(*given, 11)[2] == 11


@pytest.mark.parametrize(
    "decision", [StepDecision(7, TopK(5)), StepDecision(7, FixedLength()), PLAIN], ids=["best", "whole", "plain"]
)
def test_rows_come_with_their_layout_as_sglang_makes_them_of_it(decision, monkeypatch):
    """Its forms in torch say what they are; on a CPU it finds slots by a function that is not there."""
    laid_out(decision, torch.randn(3, 7))  # what is the same for all whole blocks is kept
    step, layout = laid_out(decision, torch.randn(3, 7))
    requests, rows = requests_of(3), layout.verify_lens.tolist()
    places = zip(requests.req_pool_indices.tolist(), requests.prefix_lens.tolist(), rows, strict=True)
    slots = torch.cat([requests.req_to_token[row, begin : begin + length] for row, begin, length in places]).long()
    monkeypatch.setattr(dspark_verify_window, "assign_extend_cache_locs_func", lambda **_: slots)
    expected = build_ragged_verify_window(
        batch=SimpleNamespace(seq_lens=requests.prefix_lens, req_pool_indices=requests.req_pool_indices),
        layout=layout,
        draft_block_ids=step.block[:, :7],
        draft_tokens=step.block[:, 1:],
        bs=3,
        device="cpu",
        verify_num_draft_tokens=8,
        model_runner=runner(req_to_token_pool=SimpleNamespace(req_to_token=requests.req_to_token)),
    )
    found = planned_rows(None, object, layout=layout)
    for name in expected.__struct_fields__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    built = RaggedVerifyLayout.from_verify_lens_device(verify_lens=layout.verify_lens, graph_num_tokens=16)
    for name in ("verify_lens", "extend_start_loc", "qo_indptr_device"):
        ours, theirs = getattr(layout, name), getattr(built, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("decision", "kernels", "operations"),
    [
        (StepDecision(7, TopK(5)), 2, 4),  # 35 before the plan laid out the rows, SGLang's 18 among them
        (StepDecision(7, FixedLength(), with_confidence=False), 1, 0),  # 23
    ],
    ids=["best", "whole"],
)
def test_what_a_step_launches_to_choose_its_rows(decision, kernels, operations, monkeypatch):
    launch = InterpretedFunction.run

    def counted(kernel, *args, **kwargs):
        with launches.one("kernel"):
            return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    logits, requests = torch.randn(3, 7), requests_of(3)
    laid_out(decision, logits)  # what all whole blocks share is kept
    step, drafted = ScheduledStep(decision, 3, CAPTURED), proposal(logits)
    with kernels_anywhere(), launches.counting("choosing rows") as counts:
        step.propose(lambda: drafted, requests.anchors, None)
        planned_rows(None, object, layout=step.lay_out(FORECAST, ALONE, requests))
    assert counts.pop("kernel") == kernels
    assert sum(counts.values()) == operations, counts


def test_the_budget_goes_to_the_drafts_that_survive():
    logits = torch.full((3, 7), -9.0)
    logits[1] = 2.0
    logits[2, :2] = 9.0
    step, layout = laid_out(StepDecision(7, TopK(5)), logits)
    assert step.verify_lens.tolist() == [0, 3, 2]
    assert layout.verify_lens.tolist() == [1, 4, 3]
    assert step.num_rows == layout.graph_num_tokens == 8


def test_the_worker_is_not_told_confidences():
    """Its planner would choose by them, and its relay copy them to the host."""
    step = ScheduledStep(StepDecision(7, TopK(5)), 2, CAPTURED)
    told = step.propose(lambda: proposal(torch.zeros(2, 7)), torch.zeros(2, dtype=torch.int64), None)
    assert told.confidence is told.confidence_raw is None


def test_a_plain_step_drafts_nothing():
    def draft():
        raise AssertionError("a forward")

    step, sampling = ScheduledStep(PLAIN, 2, CAPTURED), partly(SamplingBatchInfo, top_ks=torch.tensor([1, 40]))
    told = step.propose(draft, torch.tensor([4, 5]), sampling)
    assert told.draft_block.greedy_mask.tolist() == [True, False]  # of a batch, some may be sampled
    assert told.draft_block_ids[:, 0].tolist() == [4, 5]
    assert told.draft_block.draft_tokens.shape == (2, 7)
    assert step.lay_out(FORECAST, ALONE, requests_of(2)).verify_lens.tolist() == [1, 1]


def test_beyond_the_captured_requests_blocks_are_verified_whole():
    assert [CAPTURED.fit(requests) for requests in (1, 4, 5)] == [True, True, False]
    assert not CapturedRows(window=8, tiers=(8, 64), requests=4).fit(5)  # there are slots for four alone
    step, layout = laid_out(StepDecision(7, FixedLength()), torch.zeros(5, 7))
    assert layout is None
    assert (step.verify_lens.tolist(), step.num_rows) == ([7] * 5, 40)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_free": True}, "draft-free"),
        ({"answer_cache": 64}, "answer-cache"),
        ({"ttft_ms": 50.0}, "ttft-ms"),
        ({"max_gap_ms": 50.0}, "max-gap-ms"),
        ({"prompt_rows": 64}, "prompt-rows"),
        ({"fallback": "target-only"}, "fallback"),
    ],
    ids=["draft-free", "answers", "first tokens", "gaps", "prompts", "fallback"],
)
def test_options_of_our_own_worker_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        ScheduledServer.asked(DSparkConfig(engine="scheduled", **options), "").prepare(ServerArgs(model_path="none"))


def test_experts_that_steps_do_not_hand_on_are_refused():
    args = ServerArgs(model_path="none", enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="--enable-return-routed-experts needs our own worker"):
        ScheduledServer.asked(DSparkConfig(engine="scheduled"), "").prepare(args)


RESOLVED = dict.fromkeys(("enable_lora", "enable_two_batch_overlap", "enable_pdmux"), False) | {
    "attn_dp_size": 1,
    "nnodes": 1,
    "pp_size": 1,
    "disaggregation_mode": "null",
    "cuda_graph_config": CudaGraphConfig(decode=PhaseConfig(backend="full")),
}


@pytest.fixture
def settled(monkeypatch):
    """Return a server of arguments that SGLang has resolved, and why all requests verify as many drafts."""

    def settle(why, found=(), **options):
        monkeypatch.setattr(server, "resolved_view", lambda args: SimpleNamespace(**RESOLVED | dict(found)))
        monkeypatch.setattr(server, "why_one_length", lambda args: why)
        args = ServerArgs(model_path="none")
        asked = ScheduledServer.asked(DSparkConfig(engine="scheduled", **options), "asked")
        asked.prepare(args)
        return asked.settled(args)

    monkeypatch.delenv(MODE, raising=False)
    return settle


def test_how_much_is_verified_is_decided_once_and_told_to_the_worker(settled, monkeypatch):
    each, all_ = settled(None), settled("its layers")
    assert [(found.by_request, found.has_confidence_head) for found in (each, all_)] == [(True, True), (False, False)]
    assert each.reason.endswith("asked; each request verifies its own number of drafts")
    assert all_.reason.endswith("asked; all requests verify the same number of drafts (its layers)")
    monkeypatch.setenv(MODE, "")
    for found, mode in ((each, "compact"), (all_, "static")):
        found.set_mode()
        assert os.environ[MODE] == mode


def test_the_operator_may_say_how_much_is_verified(settled, monkeypatch):
    for mode, by_request in (("compact", True), ("static", False)):
        monkeypatch.setenv(MODE, mode)
        assert settled(None).by_request is by_request
    assert not settled("its layers").by_request
    monkeypatch.setenv(MODE, "compact")
    with pytest.raises(ConfigError, match=f"{MODE}=compact is not served: its layers"):
        settled("its layers")
    monkeypatch.setenv(MODE, "cap-accept")
    with pytest.raises(ConfigError, match=f"{MODE}=cap-accept"):
        settled(None)


def test_the_hooks_are_those_of_this_worker_alone(settled):
    args, used = ServerArgs(model_path="none"), []
    for decided in (DSparkServer(DSparkConfig(), None, dummy_draft=False), TargetOnly("no drafter"), settled(None)):
        attach(args, decided)
        used.append(FEATURE.is_used(args))
    assert used == [False, False, True]


def test_parameters_that_the_worker_would_ignore_are_refused(settled):
    served = settled(None)
    assert list(served.refusals(SamplingParams(min_p=0.0))) == []
    of_min_p, of_seed = served.refusals(SamplingParams(min_p=0.1, sampling_seed=1))
    assert "min_p=0.1;" in of_min_p and "sampling_seed=1;" in of_seed


def test_temperatures_need_a_confidence_head(settled):
    assert settled(None, confidence_sts_path="temperatures").by_request
    with pytest.raises(ConfigError, match="confidence-sts-path=temperatures"):
        settled("its layers", confidence_sts_path="temperatures")


# What is found of arguments and target where each request verifies drafts of its own.
BY_REQUEST = {
    "attention_backend": "fa3", "speculative_attention_mode": "prefill", "enable_lora": False, "graphs": "full",
    "mla": False, "head": True, "recurrent": None, "kda": None, "sparse": False, "engram": (), "mrope": False,
    "sm100": False, "prefill_attention_backend": None, "decode_attention_backend": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({}, None),
        ({"attention_backend": "triton"}, "attention backend triton"),
        ({"attention_backend": "flashinfer"}, "attention backend flashinfer"),
        ({"attention_backend": "flashinfer", "mla": True}, None),
        ({"attention_backend": "trtllm_mha"}, "attention backend trtllm_mha"),
        ({"attention_backend": "trtllm_mha", "sm100": True}, None),
        ({"decode_attention_backend": "triton"}, None),  # it verifies nothing
        ({"decode_attention_backend": "triton", "speculative_attention_mode": "decode"}, "triton"),
        ({"graphs": "disabled"}, "CUDA graphs"),
        ({"recurrent": object()}, "recurrent layers"),
        ({"recurrent": object(), "kda": object()}, None),
        ({"sparse": True}, "sparse attention"),
        ({"engram": (3,)}, "n-gram"),
        ({"mrope": True}, "three coordinates"),
        ({"enable_lora": True}, "adapters"),
        ({"head": False}, "no confidence head"),
    ],
)
def test_where_all_requests_verify_as_many_drafts(found, why, monkeypatch):
    args = SimpleNamespace(**BY_REQUEST | found)
    args.cuda_graph_config = CudaGraphConfig(decode=PhaseConfig(backend=args.graphs))
    target = model_config(text={"engram_layer_ids": args.engram}, model_is_mrope=args.mrope)
    for name, value in {
        "resolved_view": args,
        "model_config_of": target,
        "use_mla_backend": args.mla,
        "mambaish_config": args.recurrent,
        "hybrid_kda_config": args.kda,
        "is_minimax_sparse": args.sparse,
        "get_platform": SimpleNamespace(is_sm100=args.sm100),
        "_has_head": args.head,
    }.items():
        monkeypatch.setattr(lengths, name, lambda *_, value=value: value)
    said = lengths.why_one_length(args)
    assert said is None if why is None else why in said


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"attn_dp_size": 2}, "data parallelism"),
        ({"enable_two_batch_overlap": True}, "two-batch"),
        ({"enable_pdmux": True}, "PD multiplexing"),
        ({"nnodes": 2}, "nodes"),
        ({"pp_size": 2}, "pipeline"),
        ({"disaggregation_mode": "prefill"}, "prefill-decode"),
    ],
)
def test_what_it_would_verify_wrongly_is_refused(found, named, settled):
    for why in (None, "its layers"):
        with pytest.raises(ConfigError, match=named):
            settled(why, found)


def test_adapters_are_served_without_graphs(settled):
    no_graphs = CudaGraphConfig(decode=PhaseConfig(backend="disabled"))
    assert settled("its layers", {"enable_lora": True, "cuda_graph_config": no_graphs})
    with pytest.raises(ConfigError, match="adapters in CUDA graphs"):
        settled("its layers", {"enable_lora": True})


@pytest.mark.parametrize("name", ["SGLANG_DSPARK_DEFER_CONTEXT_KV", "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY"])
def test_what_a_step_hands_to_the_next_is_refused_at_several_widths(name, settled, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert settled(None)
    with pytest.raises(ConfigError, match=name):
        settled("its layers")
