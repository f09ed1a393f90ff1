"""Tests of SGLang's own worker, under our schedule and unmodified, without a server.

It keeps the drafts that ours keeps. On servers: test_greedy.py.
"""

import os
from array import array
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from dspark_kernels import simulated_accept
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang_objects import ONE_RANK, model_config, partly
from step_tables import schedule

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine import hooks
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.server import DSparkServer, TargetOnly, attach
from sglang_dspark.errors import ConfigError
from sglang_dspark.features import builtin_worker
from sglang_dspark.features.builtin_worker import FEATURE, MODE, ScheduledServer, step
from sglang_dspark.features.builtin_worker.step import Rows, ScheduledStep, SimulatedWorker, simulated_acceptance
from sglang_dspark.features.builtin_worker.worker import ScheduledResult, ScheduledWorker, choose_worker
from sglang_dspark.step.decision import PLAIN, StepDecision, StepRecord
from sglang_dspark.step.packed import Packed
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import RequestLimits

CAPTURED = Rows(window=8, by_request=True, tiers=(8, 16, 32))
WHOLE = Rows(window=8, by_request=False)
ALONE = Agreement(ONE_RANK)
FORECAST = schedule(gamma=7).forecast


def proposal(logits):
    """Return what the worker drafts: the block's tokens, and its confidences."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal

    bs, gamma = logits.shape
    tokens = torch.arange(bs * gamma).view(bs, gamma)
    block = DraftBlockResult(tokens, None, torch.ones(bs, dtype=torch.bool), torch.ones(bs), greedy_draft=True)
    return DraftProposal(tokens, block, confidence=logits.sigmoid(), confidence_raw=logits, folded=True)


def laid_out(decision, logits, rows=CAPTURED):
    step, anchors = ScheduledStep(decision, len(logits), rows), torch.zeros(len(logits), dtype=torch.int64)
    step.propose(lambda: proposal(logits), anchors, None)
    return step, step.lay_out(FORECAST, ALONE)


def test_rows_are_padded_to_the_next_tier():
    """On the device: nothing of a captured layout is known to the host."""
    assert [CAPTURED.number(3, drafts) for drafts in (0, 5, 13, None)] == [8, 8, 16, 32]
    assert [Rows(8, by_request=True).number(3, drafts) for drafts in (5, None)] == [8, 24]
    assert [WHOLE.number(3, drafts) for drafts in (0, 5, None)] == [24, 24, 24]
    step, layout = laid_out(StepDecision(7, TopK(8)), torch.zeros(3, 7))
    assert (step.num_rows, layout.graph_num_tokens, layout.verify_lens_cpu) == (16, 16, None)
    assert layout.qo_indptr_device.tolist() == [0, *(step.verify_lens + 1).cumsum(0).tolist()]


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
    assert step.lay_out(FORECAST, ALONE).verify_lens.tolist() == [1, 1]


def test_beyond_the_captured_requests_blocks_are_verified_whole():
    assert [CAPTURED.fit(requests) for requests in (1, 4, 5)] == [True, True, False]
    step, layout = laid_out(StepDecision(7, FixedLength()), torch.zeros(5, 7))
    assert layout is None
    assert (step.verify_lens.tolist(), step.num_rows) == ([7] * 5, 40)


LIMITED = RequestLimits((0, 3, 1))


@pytest.mark.parametrize(
    ("decision", "lens"),
    [
        (StepDecision(7, TopK(21), with_confidence=False).within(LIMITED), [0, 3, 1]),
        (StepDecision(3, FixedLength(), with_confidence=False), [3, 3, 3]),
        (PLAIN, [0, 0, 0]),
    ],
    ids=["limits", "length", "plain"],
)
def test_what_is_accepted_of_whole_blocks_is_cut(decision, lens):
    """Not by a graph, which accepts all that it computes."""
    step, drafted = ScheduledStep(decision, 3, WHOLE), proposal(torch.zeros(3, 7))
    told = step.propose(lambda: drafted, torch.zeros(3, dtype=torch.int64), None)
    assert (told.folded, told.verify_ids, told.draft_block.draft_tokens.shape) == (False, None, (3, 7))
    layout = step.lay_out(FORECAST, ALONE)
    assert step.verify_lens.tolist() == lens
    assert layout.verify_lens.tolist() == [1 + drafts for drafts in lens]
    assert step.num_rows == layout.graph_num_tokens == 24


def test_blocks_that_nothing_cuts_are_accepted_by_the_worker():
    step = ScheduledStep(StepDecision(7, FixedLength(), with_confidence=False), 3, WHOLE)
    assert step.propose(lambda: proposal(torch.zeros(3, 7)), torch.zeros(3, dtype=torch.int64), None).folded
    assert step.lay_out(FORECAST, ALONE) is None
    assert step.verify_lens.tolist() == [7, 7, 7]


def test_tokens_and_lengths_can_be_read_before_a_result_is_processed():
    """SGLang reads them early for grammars. They stay when the memory is used again."""
    record = StepRecord(["a", "b"], PLAIN, [2, 2], torch.tensor([2, 1]), None, None)
    tokens, lens = torch.tensor([7, 8, 9, 4, -1, -1]), torch.tensor([3, 1], dtype=torch.int32)
    pending = Packed.of([tokens, *record.tensors, lens])
    output, done = LogitsProcessorOutput(next_token_logits=None), torch.cpu.Event()
    result = ScheduledResult(logits_output=output, record=record, pending=pending, copy_done=done)
    result.copy_to_cpu(return_logprob=False)
    assert (result.next_token_ids.tolist(), result.accept_lens.tolist()) == (tokens.tolist(), lens.tolist())
    result.read_copy()
    pending.flat.fill_(-5)
    result.read_copy()  # once more changes nothing
    assert (result.next_token_ids.tolist(), result.accept_lens.tolist()) == (tokens.tolist(), lens.tolist())
    assert (result.record.verified, result.cap_lens.tolist()) == ([2, 1], [3, 2])
    assert result.block_accept_lens.tolist() == [2, 2]


def resolved(args, **options):
    """Return the server of a start whose arguments SGLang resolves without any question."""
    asked = ScheduledServer(DSparkConfig(engine="scheduled", **options))
    asked.prepare(args)
    return asked.settled(args)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_free": True}, "draft-free"),
        ({"answer_cache": 64}, "answer-cache"),
        ({"max_gap_ms": 50.0}, "max-gap-ms"),
        ({"prompt_rows": 64}, "prompt-rows"),
        ({"fallback": "target-only"}, "fallback"),
    ],
    ids=["draft-free", "answers", "gaps", "prompts", "fallback"],
)
def test_options_of_our_own_worker_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        resolved(ServerArgs(model_path="none"), **options)


def test_experts_that_steps_do_not_hand_on_are_refused():
    args = ServerArgs(model_path="none", enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="--enable-return-routed-experts needs the plugin's worker"):
        resolved(args)


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
        monkeypatch.setattr(builtin_worker, "resolved_view", lambda args: SimpleNamespace(**RESOLVED | dict(found)))
        monkeypatch.setattr(builtin_worker, "why_whole_blocks", lambda args: why)
        return resolved(ServerArgs(model_path="none"), **options)

    monkeypatch.delenv(MODE, raising=False)
    return settle


@pytest.mark.usefixtures("unhooked")
def test_how_much_is_verified_is_decided_once_and_told_to_the_worker(settled, monkeypatch):
    each, all_ = settled(None), settled("its layers")
    assert [(found.by_request, found.has_confidence_head) for found in (each, all_)] == [(True, True), (False, False)]
    assert each.reason.endswith("engine asks; each request verifies its own number of drafts")
    assert all_.reason.endswith("a whole block, of which the policy decides what counts (its layers)")
    monkeypatch.setenv(MODE, "")
    for found, mode in ((each, "compact"), (all_, "static")):
        attach(args := ServerArgs(model_path="none"), found)
        assert choose_worker(DSparkWorkerV2, None, args) is ScheduledWorker
        assert os.environ[MODE] == mode


def test_a_variable_that_asks_for_another_verification_is_refused(settled, monkeypatch):
    for mode, why in (("compact", None), ("static", "its layers")):
        monkeypatch.setenv(MODE, mode)
        assert settled(why).mode == mode
    for mode, why in (("static", None), ("compact", "its layers"), ("cap-accept", None)):
        monkeypatch.setenv(MODE, mode)
        with pytest.raises(ConfigError, match=f"{MODE}={mode} in the environment .*; unset it: .*own worker"):
            settled(why)


def test_the_hooks_are_only_those_of_this_worker(settled):
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
        ({"attention_backend": "triton"}, "attention backend, triton"),
        ({"attention_backend": "flashinfer"}, "attention backend, flashinfer"),
        ({"attention_backend": "flashinfer", "mla": True}, None),
        ({"attention_backend": "trtllm_mha"}, "attention backend, trtllm_mha"),
        ({"attention_backend": "trtllm_mha", "sm100": True}, None),
        ({"decode_attention_backend": "triton"}, None),  # it verifies nothing
        ({"decode_attention_backend": "triton", "speculative_attention_mode": "decode"}, "triton"),
        ({"graphs": "disabled"}, "CUDA graphs"),
        ({"recurrent": object()}, "recurrent layer"),
        ({"recurrent": object(), "kda": object()}, None),
        ({"sparse": True}, "sparse attention"),
        ({"engram": (3,)}, "n-gram"),
        ({"mrope": True}, "M-RoPE"),
        ({"enable_lora": True}, "adapter"),
        ({"head": False}, "no confidence head"),
    ],
)
def test_where_blocks_are_whole(found, why, monkeypatch):
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
        monkeypatch.setattr(builtin_worker, name, lambda *_, value=value: value)
    said = builtin_worker.why_whole_blocks(args)
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


@pytest.mark.parametrize("name", ["SGLANG_DSPARK_DEFER_CONTEXT_KV", "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY"])
def test_what_a_step_hands_to_the_next_is_refused_with_whole_blocks(name, settled, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert settled(None)
    with pytest.raises(ConfigError, match=name):
        settled("its layers")


RATES, VARIABLE = "0.9,0.6,0.8", "SGLANG_DSPARK_SIMULATE_ACCEPTANCE"
PROMPTS = [[5, 6, 7], [70000, 1], [5, 6]]


def worker(**found):
    """A worker that is served, except what is found."""
    found = {"load_format": "dummy", "mode": "static", "epilogue": None} | found
    pool = SimpleNamespace(req_to_token=torch.zeros(9, 30, dtype=torch.int32))
    return SimpleNamespace(
        gamma=7,
        server_args=SimpleNamespace(load_format=found["load_format"]),
        model_runner=SimpleNamespace(device="cpu", req_to_token_pool=pool),
        _verify_planner=SimpleNamespace(mode_value=found["mode"]),
        _verify_epilogue=found["epilogue"],
    )


def batch(mode, rows, prompts):
    reqs = [SimpleNamespace(origin_input_ids=prompt) for prompt in prompts]
    return SimpleNamespace(reqs=reqs, req_pool_indices=torch.tensor(rows, dtype=torch.int64), forward_mode=mode)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setenv(VARIABLE, RATES)
    return partly(SimulatedWorker, simulated=simulated_acceptance(worker()))


def test_lengths_are_replaced_by_those_of_the_draws(started):
    """Draws go by the prompt, whichever rows requests have."""
    lens = torch.tensor([30, 31, 500])
    drafts, bonus, cap = torch.arange(21).view(3, 7), torch.tensor([1, 2, 3]), object()
    for rows in ([3, 1, 8], [2, 5, 4]):
        started.batch_comes(batch(ForwardMode.EXTEND, rows, PROMPTS))
        started.batch_comes(batch(ForwardMode.IDLE, [], []))
        started.batch_comes(batch(ForwardMode.DECODE, rows, PROMPTS))
        given = {"prefix_lens": lens, "draft_tokens": drafts, "bonus": bonus, "cap_trim_lens": cap}
        told = step.accept(dict, correct_len=torch.zeros(3, dtype=torch.int32), **given)
        draws = started.simulated.draws
        assert draws.keys[rows].tolist() == [crc32(array("q", prompt).tobytes()) for prompt in PROMPTS]
        expected = simulated_accept(draws, torch.tensor(rows), lens, drafts, bonus).accept_lens
        assert told.pop("correct_len").tolist() == expected.tolist() and told == given


@pytest.mark.parametrize(
    ("found", "variables", "named"),
    [
        ({"load_format": "auto"}, {}, "load-format dummy"),
        ({"mode": "compact"}, {}, "SGLANG_RAGGED_VERIFY_MODE=static"),
        ({"epilogue": object()}, {}, "outside of its graph"),
        ({}, {"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN unset"),
        ({}, {VARIABLE: ",".join(["0.5"] * 8)}, "give 7 or fewer"),
    ],
)
def test_what_the_draws_do_not_reach_is_refused(found, variables, named, monkeypatch):
    for name, value in ({VARIABLE: RATES} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        simulated_acceptance(worker(**found))


def test_hooks_are_there_where_the_variable_is_set(monkeypatch):
    registered = []
    monkeypatch.setattr(hooks.HookRegistry, "register", lambda target, handler, kind: registered.append(handler))
    hooks.register_flags()
    assert step.accept not in registered
    monkeypatch.setenv(VARIABLE, RATES)
    hooks.register_flags()
    assert {step.choose_worker, step.accept} < {*registered}
