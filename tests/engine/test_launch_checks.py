"""The table of checks: each refuses with flag, value and remedy, and lets what is served pass."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_contexts import found_by, launch_context

from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.engine.launch import checks
from sglang_dspark.engine.launch.check import Check, Stage
from sglang_dspark.engine.launch.checks import all_checks, refuse
from sglang_dspark.engine.launch.flag_checks import KNOWN_BY, SINKS
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

DRAFT = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
FREE = {"draft_free": True}
HEADLESS = SimpleNamespace(config=SimpleNamespace(enable_confidence_head=False, origin="draft/config.json"))
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def text(**fields):
    """The configuration of a target's text."""
    return {"hf_text_config": SimpleNamespace(original_max_position_embeddings=4096, **fields)}


TWO_POOLS = {"is_hybrid_swa": True, "head_dim": 512}
# The check, a start that it refuses, and what it says of it.
REFUSED = [
    (
        "fallback of nodes",
        {"nnodes": 2, "options": {"fallback": "target-only"}},
        "--speculative-dspark-fallback=target-only cannot be combined with --nnodes=2: .*; drop the flag",
    ),
    (
        "drafter beside draft-free",
        {"speculative_draft_model_path": "x", "options": FREE},
        "--speculative-draft-model-path=x names a drafter, and .*-draft-free serves without one; drop one of the flags",
    ),
    (
        "window of the drafter",
        {"speculative_draft_window_size": 0},
        "--speculative-draft-window-size=0 leaves nothing of a context; pass 1 or more",
    ),
    (
        "window of the drafter",
        {"speculative_draft_window_size": 9, "speculative_draft_sink_size": -1},
        "--speculative-draft-sink-size=-1 is no number of tokens; pass 0 or more",
    ),
    (
        "window of the drafter",
        {"speculative_draft_sink_size": 4},
        "--speculative-draft-sink-size=4 needs --speculative-draft-window-size",
    ),
    (
        "window of the drafter",
        {"speculative_draft_window_size": 9, "options": FREE},
        "--speculative-draft-window-size=9 belongs to a drafter, and .*-draft-free serves without one",
    ),
    (
        "form of draft weights",
        {"speculative_draft_load_format": "gguf"},
        "--speculative-draft-load-format=gguf: .*; drop the flag, or pass dummy",
    ),
    (
        "kernels of experts",
        {"moe_a2a_backend": "flashinfer_megamoe"},
        "--moe-a2a-backend=flashinfer_megamoe, .*; drop the flag",
    ),
    ("device", {"device": "npu"}, "--device=npu; pass cpu or cuda, or --speculative-dspark-engine builtin"),
    (
        "target family",
        {"target": {"hf_config": SimpleNamespace(architectures=["GPT2LMHeadModel"])}},
        "--model-path: target architecture .*GPT2LMHeadModel.* is not served",
    ),
    (
        "dimensions of the pair",
        {"target": text(hidden_size=64, vocab_size=256, num_hidden_layers=6)},
        "hidden_size=128, but the target has hidden_size=64; use the draft that was trained for this target",
    ),
    (
        "block size",
        {"options": {"block_size": 24}},
        "--speculative-dspark-block-size=24 exceeds the 7 drafts .*; pass 23 or less",
    ),
    (
        "block size",
        {"options": {"schedule": "static", "verify_len": 8}},
        "--speculative-dspark-verify-len=8 exceeds the 7 drafts of a block; pass a value from 0 to 7",
    ),
    (
        "context of the target's RoPE",
        {"target": text(rope_parameters=LONGROPE)},
        "--context-length=8192: beyond 4096 tokens .*; pass --context-length 4088 or less",
    ),
    (
        "rows of attention",
        {"options": FREE | {"block_size": 256}},
        "--speculative-dspark-block-size=256 needs 257 rows of attention .* leave room for 128; pass 127 or less",
    ),
    (
        "number of draft tokens",
        {"speculative_num_draft_tokens": 4},
        "--speculative-num-draft-tokens=4 contradicts the block size 7; pass 8 or drop the flag",
    ),
    (
        "simulated acceptance",
        {"options": {"simulate_acceptance": (0.5,)}},
        "--speculative-dspark-simulate-acceptance=0.5,.* keeps drafts by chance.*; pass it with --load-format dummy",
    ),
    (
        "simulated acceptance",
        {"load_format": "dummy", "options": {"simulate_acceptance": (0.5,) * 8}},
        "--speculative-dspark-simulate-acceptance has 8 probabilities, and a block has 7 drafts; give 7 or fewer",
    ),
    (
        "confidence head",
        {"drafter": HEADLESS, "options": {"schedule": "threshold", "confidence_threshold": 0.5}},
        "--speculative-dspark-schedule=threshold needs a confidence head, and draft/config.json has none; pass auto",
    ),
    ("temperatures", {"options": {"confidence_sts_path": "no-such.json"}}, "no-such.json"),
    (
        "dtype of K/V",
        {"kv_cache_dtype": "bfloat16", "target": {"dtype": torch.float16}},
        "--kv-cache-dtype=bfloat16 beside a target in torch.float16: .*; pass auto, or --dtype bfloat16",
    ),
    (
        "attention of prompts",
        {"prefill": "trtllm_mha", "decode": "trtllm_mha"},
        "--attention-backend=trtllm_mha on cuda; pass --attention-backend fa3 or flashinfer or triton",
    ),
    (
        "attention of prompts",
        {"device": "cpu", "prefill": "triton", "decode": "triton"},
        "--attention-backend=triton on cpu; pass --attention-backend torch_native",
    ),
    (
        "attention of prompts",
        {"prefill": "flashinfer", "target": {"has_attention_sinks": True}},
        "--attention-backend=flashinfer on cuda; the target has attention sinks: pass --attention-backend fa3",
    ),
    (
        "attention of prompts",
        {"device": "cpu", "prefill": "torch_native", "target": {"has_attention_sinks": True}},
        "on cpu; the target has attention sinks: serve it on a GPU and pass --attention-backend fa3 or triton",
    ),
    (
        "attention of prompts",
        {"device": "cpu", "prefill": "torch_native", "target": TWO_POOLS},
        "for layers with a window and heads of over 256: serve it on a GPU and pass --attention-backend triton",
    ),
    (
        "attention of prompts",
        {"prefill": "fa3", "target": TWO_POOLS},
        "--attention-backend=fa3 on cuda; the target has .*: pass --attention-backend triton",
    ),
    ("attention of decoding", {"decode": "triton"}, "--decode-attention-backend=triton: .*; drop the flag"),
    (
        "graphs of prefills",
        {"cuda_graph_backend_prefill": "full"},
        "--cuda-graph-backend-prefill=full, .*; pass breakable or disabled",
    ),
    (
        "kernels of adapters",
        {"enable_lora": True, "lora_backend": "torch_native"},
        "--enable-lora and --lora-backend=torch_native on cuda; pass --lora-backend csgmv or triton",
    ),
    (
        "kernels of adapters",
        {"lora_paths": ["x"], "lora_backend": "csgmv", "device": "cpu"},
        "--lora-paths and --lora-backend=csgmv on cpu; pass --lora-backend torch_native",
    ),
    (
        "pages",
        {"page_size": 16, "device": "cpu"},
        "--page-size=16 on cpu: SGLang hands out pages with CUDA kernels; pass 1",
    ),
    (
        "prefixes in host memory",
        {"enable_hierarchical_cache": True, "device": "cpu"},
        "--enable-hierarchical-cache on cpu: SGLang copies K/V to host memory with CUDA kernels; drop the flag",
    ),
    (
        "prefixes in host memory",
        {"enable_hierarchical_cache": True, "prefill": "triton", "decode": "triton", "target": TWO_POOLS},
        "--enable-hierarchical-cache beside a target that has a K/V pool .*; drop the flag, or pass --disable-hybrid",
    ),
]

SERVED = [
    {},
    {"options": {"fallback": "target-only"}},
    {"prefill": "triton", "decode": "triton", "target": {"has_attention_sinks": True}},
    {"prefill": "triton", "decode": "triton", "target": TWO_POOLS},
    {"target": {"has_attention_sinks": True, "is_hybrid_swa": True}},
    {"prefill": "flashinfer", "decode": "flashinfer", "cuda_graph_backend_prefill": "breakable"},
    {"kv_cache_dtype": "bfloat16"},
    {"speculative_num_draft_tokens": 8},
    {"load_format": "dummy", "options": {"simulate_acceptance": (0.5,) * 7}},
    {"enable_lora": True},
    {"lora_paths": [], "lora_backend": "ascend"},
    {"enable_hierarchical_cache": True},
    {"page_size": 64},
    {"speculative_draft_window_size": 1, "speculative_draft_sink_size": 0},
    {"options": FREE | {"block_size": 127}},
    {"target": {"context_len": 4088, **text(rope_parameters=LONGROPE)}},
]
ELSEWHERE = {  # and the file that tests it
    "layers read from the target": "test_launch.py",
    "flags of SGLang": "test_flag_rules.py",
    "server in Rust": "test_launch.py",
    "size of the K/V pool": "test_launch.py",
    "memory of adapters": "below",
    "recurrent layers": "features/recurrent/test_checks.py",
    "flags beside recurrent layers": "the same",
}


def start(**given):
    """The start of the golden drafter, or of none."""
    free = given.get("options", {}).get("draft_free")
    return launch_context(**{"drafter": None if free else ResolvedDrafter.read(DRAFT)} | given)


@pytest.mark.parametrize(("name", "given", "complaint"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named_with_a_remedy(name, given, complaint):
    message = found_by(name, start(**given))
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(message)


@pytest.mark.parametrize("given", SERVED, ids=lambda given: str(given)[:60])
def test_what_is_served_passes(given):
    context = start(**given)
    made = {row[0] for row in REFUSED} - {"dimensions of the pair"}  # the target above has none
    assert [found for name in made if (found := found_by(name, context))] == []


def test_every_check_is_tested():
    names = [check.name for check in all_checks()]
    assert {row[0] for row in REFUSED} | set(ELSEWHERE) == set(names)
    assert len(set(names)) == len(names)


def test_backends_with_sinks_are_served():
    assert set(KNOWN_BY[SINKS]) == {"fa3", "triton"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_room_for_rows_depends_on_heads(dtype):
    """A block of any length is served on a CPU."""
    most = 63
    target = {"head_dim": 256 if dtype == torch.float16 else 128, "dtype": dtype}
    found = found_by("rows of attention", start(target=target, options=FREE | {"block_size": 256}))
    assert found.endswith(f"pass {most} or less")
    assert found_by("rows of attention", start(target=target, options=FREE | {"block_size": most})) is None
    assert found_by("rows of attention", start(device="cpu", options=FREE | {"block_size": 256})) is None


def test_a_machine_without_pinned_memory_is_told(monkeypatch):
    def fail(tensor):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    assert "pinned memory" in found_by("memory of adapters", start(device="cpu", enable_lora=True))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert found_by("memory of adapters", start(device="cpu", enable_lora=True)) is None


@pytest.mark.parametrize(
    ("capability", "rocm", "complaint"),
    [
        ((7, 5), None, "--device=cuda: this GPU has compute capability 7.5, and the kernels of DSPARK need 8.0"),
        ((9, 4), "6.2", "--device=cuda: this torch was built for ROCm"),
        ((8, 0), None, None),
    ],
)
def test_gpus_without_kernels(monkeypatch, capability, rocm, complaint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    refusal = found_by("device", start())
    assert refusal is None if complaint is None else complaint in refusal


def raising(error):
    def find(context):
        raise error

    return find


def check(message, unserved=False):
    return Check(message, Stage.FLAGS, lambda context: message, unserved)


def test_all_that_fails_is_said_at_once_and_once(monkeypatch):
    rows = (check("a"), Check("b", Stage.FLAGS, raising(ConfigError("b"))), check("b", unserved=True), check(None))
    monkeypatch.setattr(checks, "all_checks", lambda: (*rows, Check("later", Stage.MODELS, lambda context: "later")))
    with pytest.raises(ConfigError) as caught:
        refuse(start(), Stage.FLAGS)
    assert str(caught.value) == "a\nb" and not isinstance(caught.value, UnservedError)
    refuse(start(), Stage.OPTIONS)


def test_what_is_not_served_may_fall_back(monkeypatch):
    unusable = Check("drafter", Stage.FLAGS, raising(CheckpointError("unusable")), unserved=True)
    monkeypatch.setattr(checks, "all_checks", lambda: (check("a"), unusable))
    with pytest.raises(UnservedError, match="a\nunusable"):
        refuse(start(), Stage.FLAGS)


def test_a_failure_of_our_own_is_no_message(monkeypatch):
    monkeypatch.setattr(checks, "all_checks", lambda: (Check("broken", Stage.FLAGS, raising(KeyError("x"))),))
    with pytest.raises(KeyError):
        refuse(start(), Stage.FLAGS)
