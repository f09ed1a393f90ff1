"""Tests of the checks of a start: each refuses with flag, value and remedy, and lets what is served pass.

Every family of targets gives in SGLang's model the hidden states and greedy texts of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from family_targets import GEMMA4_EXPERTS, NUM_TOKENS, PROMPTS, TINY, continued, outputs_of, write_target
from server_pool import ON_GPU
from sglang_objects import GOLDEN, found_by, launch_context
from target_probe import TAPS, Text, ask

from sglang_dspark.draft.families import FAMILIES, UNSERVED, family_of, is_left_to_sglang
from sglang_dspark.draft.quantised import Storage
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine import checks
from sglang_dspark.engine.checks import all_checks
from sglang_dspark.engine.feature import Check, Stage, flag_of
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

DRAFTER = ResolvedDrafter.read(GOLDEN / "vanilla_g7")
NO_HEAD = {"enable_confidence_head": False, "confidence_head_with_markov": False, "origin": "draft/config.json"}
HEADLESS = replace(DRAFTER, reading=replace(DRAFTER.reading, config=replace(DRAFTER.config, **NO_HEAD)))
METHOD, FORM = "speculative_draft_model_quantization", "speculative_draft_load_format"
INT4, GGUF = (
    replace(DRAFTER, reading=replace(DRAFTER.reading, storage=Storage(words, frozenset({method}), 9, 9)))
    for words, method in (("int4 of a library", "compressed-tensors"), ("GGUF", "gguf"))
)
BOUNDED = {"schedule": "threshold", "confidence_threshold": 0.5}
LONGROPE = {"text": {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}}
SAME_BITS = {"enable_deterministic_inference": True}
WINDOW, SINK_SIZE = "speculative_draft_window_size", "speculative_draft_sink_size"
# By check: starts that it refuses, and what it says of each.
REFUSED = {
    "fallback of nodes": [({"nnodes": 2, "fallback": "target-only"}, "-fallback=target-only .*--nnodes=2.*; drop")],
    "nodes of replicas": [({"nnodes": 2, "dp_size": 2}, "--dp-size=2 .*--nnodes=2; start a server")],
    "application of tokenizer workers": [
        ({"tokenizer_worker_num": 2, "admin_api_key": "k"}, "--admin-api-key .*-worker-num=2.*; drop"),
    ],
    "drafter with draft-free": [
        ({"speculative_draft_model_path": "x", "draft_free": True}, "-model-path=x .*-draft-free .*; drop"),
    ],
    "window of the drafter": [
        ({WINDOW: 0}, "-draft-window-size=0 .*; pass 1 or more"),
        ({WINDOW: 9, SINK_SIZE: -1}, "-draft-sink-size=-1 .*; pass 0 or more"),
        ({SINK_SIZE: 4}, "-draft-sink-size=4 .*--speculative-draft-window-size"),
        ({WINDOW: 9, "draft_free": True}, "-draft-window-size=9 .*-draft-free"),
    ],
    "form of draft weights": [({"speculative_draft_load_format": "pt"}, "-load-format=pt: .*; drop .*, or pass dummy")],
    "storage of the drafter": [
        ({METHOD: "fp8"}, f"{flag_of(METHOD)}=fp8, .*; drop the flag"),
        ({METHOD: "fp8", "draft_free": True}, "=fp8, .*; drop"),
        ({METHOD: "fp8", "drafter": INT4}, "=fp8, .* int4 of a library; drop"),
        ({FORM: "gguf"}, f"{flag_of(FORM)}=gguf, .*; drop"),
        ({FORM: "safetensors", "drafter": GGUF}, "=safetensors, .* GGUF; drop"),
    ],
    "device": [({"device": "npu"}, "--device=npu; pass cpu or cuda, or --speculative-dspark-engine builtin")],
    "target family": [
        ({"target": {"architecture": "GPT2LMHeadModel"}}, "--model-path: .*GPT2LMHeadModel"),
    ],
    "dimensions of the pair": [
        ({"target": {"text": {"hidden_size": 64}}}, "hidden_size=128, .* hidden_size=64; use the draft"),
    ],
    "block size": [
        ({"block_size": 24}, "--speculative-dspark-block-size=24 .*; pass 23 or less"),
        ({"schedule": "static", "verify_len": 8}, "-verify-len=8 .*; pass .* 0 to 7"),
    ],
    "context of the target's RoPE": [
        ({"target": LONGROPE}, "--context-length=8192.*; pass --context-length 4088 or less"),
    ],
    "rows of attention": [
        ({"draft_free": True, "block_size": 256}, "block-size=256 .*; pass 127 or less"),
    ],
    "simulated acceptance": [
        (
            {"simulate_acceptance": (0.5,)},
            "-acceptance=0.5,.*; pass it with --load-format dummy",
        ),
        ({"load_format": "dummy", "simulate_acceptance": (0.5,) * 8}, "has 8 .*; give 7 or"),
    ],
    "confidence head": [
        (
            {"drafter": HEADLESS, **BOUNDED},
            "=threshold .* draft/config.json .*; pass auto",
        ),
    ],
    "temperatures": [({"confidence_sts_path": "no-such.json"}, "no-such.json")],
    "dtype of K/V": [
        (
            {"kv_cache_dtype": "bfloat16", "target": {"dtype": torch.float16}},
            "=bfloat16 and .*float16: .*; pass --kv-cache-dtype auto, or",
        ),
    ],
    "attention of prompts": [
        (
            {"prefill": "dual_chunk_flash_attn"},
            "-backend=dual_chunk_flash_attn on cuda; pass --attention-backend fa3",
        ),
        ({"device": "cpu", "prefill": "triton"}, "--attention-backend=triton on cpu; pass .* torch_native"),
    ],
    "the same bits": [
        ({**SAME_BITS, "draft_free": True, "block_size": 16}, "17 rows .*; pass .*-block-size 15 or less"),
        ({**SAME_BITS, "enable_mixed_chunk": True}, "forward pass as drafts; drop --enable-mixed-chunk"),
        ({**SAME_BITS, "prompt_rows": 8}, "forward pass as drafts; drop"),
        ({**SAME_BITS, "unproven": ("prompt-rows",)}, "forward pass as drafts; drop"),
        ({**SAME_BITS, "target": {"architecture": "Qwen3_5ForCausalLM"}}, "recurrent layers .*; drop the flag"),
        (
            {**SAME_BITS, "target": {"architecture": "Gemma4ForConditionalGeneration"}},
            "over pictures; drop the flag",
        ),
        ({**SAME_BITS, "enable_lora": True}, "and --enable-lora: .*; drop one"),
    ],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]
SERVED = [
    {},
    {"fallback": "target-only"},
    {"prefill": "trtllm_mha", "page_size": 64},
    {"prefill": "fa4", "page_size": 128},
    {"device": "cpu", "prefill": "torch_native"},
    {"kv_cache_dtype": "bfloat16"},
    {"load_format": "dummy", "simulate_acceptance": (0.5,) * 7},
    {WINDOW: 1, SINK_SIZE: 0},
    {"draft_free": True, "block_size": 127},
    {"target": {"context_len": 4088, **LONGROPE}},
    {METHOD: "unquant", FORM: "safetensors"},
    {METHOD: "compressed-tensors", FORM: "safetensors", "drafter": INT4},
    {METHOD: "gguf", FORM: "gguf", "drafter": GGUF},
    {METHOD: "unquant", "drafter": GGUF},
    SAME_BITS,
    {**SAME_BITS, "draft_free": True, "block_size": 15, "prompt_rows": 0},
    {**SAME_BITS, "device": "cpu", "prefill": "torch_native", "prompt_rows": 8},
]
ELSEWHERE = {  # and the file that tests it
    "flags of SGLang": "test_flags.py",
    "layers read from the target": "test_start.py",
    "variables of SGLang": "test_start.py",
    "memory of adapters": "below",
    "recurrent layers": "features/test_recurrent.py",
    "snapshots of states": "the same",
    "bound on gaps": "features/test_mixed_chunks.py",
}


@pytest.mark.parametrize(("name", "given", "complaint"), ROWS, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named_with_a_remedy(name, given, complaint):
    message = found_by(name, launch_context(**given))
    assert message and re.search(complaint, message), message


@pytest.mark.parametrize("given", SERVED, ids=lambda given: str(given)[:60])
def test_what_is_served_passes(given):
    context = launch_context(**given)
    assert [found for name in REFUSED if (found := found_by(name, context))] == []


def test_every_check_is_tested():
    names = [check.name for check in all_checks()]
    assert {*REFUSED, *ELSEWHERE} == set(names)
    assert len(set(names)) == len(names)


def test_another_application_of_tokenizer_workers_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "mine:app")
    found = [found_by("application of tokenizer workers", launch_context(tokenizer_worker_num=n)) for n in (1, 2)]
    assert found[0] is None
    assert "SGLANG_HTTP_SERVER_APP_PATH=mine:app" in found[1] and found[1].endswith("unset the variable")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_room_for_rows_depends_on_heads(dtype):
    """A block of any length is served on a CPU."""
    most = 63
    target = {"head_dim": 256 if dtype == torch.float16 else 128, "dtype": dtype}
    found = found_by("rows of attention", launch_context(target=target, draft_free=True, block_size=256))
    assert found.endswith(f"pass {most} or less")
    assert found_by("rows of attention", launch_context(target=target, draft_free=True, block_size=most)) is None
    assert found_by("rows of attention", launch_context(device="cpu", draft_free=True, block_size=256)) is None


def test_a_machine_without_pinned_memory_is_told(monkeypatch):
    def fail(tensor):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    assert "pinned memory" in found_by("memory of adapters", launch_context(device="cpu", enable_lora=True))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert found_by("memory of adapters", launch_context(device="cpu", enable_lora=True)) is None


@pytest.mark.parametrize(
    ("capability", "rocm", "complaint"),
    [
        ((7, 5), None, "--device=cuda: .* 7.5, .* 8.0"),
        ((9, 4), "6.2", "--device=cuda: .* ROCm"),
        ((8, 0), None, None),
    ],
)
def test_gpus_without_kernels(monkeypatch, capability, rocm, complaint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    refusal = found_by("device", launch_context())
    assert refusal is None if complaint is None else re.search(complaint, refusal)


def raising(error):
    def find(context):
        raise error

    return find


def check(message, unserved=False):
    return Check(message, Stage.FLAGS, lambda context: message, unserved)


@pytest.fixture
def refuse(monkeypatch):
    """Refuses a start by these checks in place of ours."""

    def refuse(*rows, stage=Stage.FLAGS):
        monkeypatch.setattr(checks, "all_checks", lambda: rows)
        checks.refuse(launch_context(), stage)

    return refuse


def test_all_that_fails_is_said_at_once_and_once(refuse):
    rows = (check("a"), Check("b", Stage.FLAGS, raising(ConfigError("b"))), check("b", unserved=True), check(None))
    rows = (*rows, Check("later", Stage.MODELS, lambda context: "later"))
    with pytest.raises(ConfigError) as caught:
        refuse(*rows)
    assert str(caught.value) == "a\nb" and not isinstance(caught.value, UnservedError)
    refuse(*rows, stage=Stage.OPTIONS)


def test_what_is_not_served_may_fall_back(refuse):
    unusable = Check("drafter", Stage.FLAGS, raising(CheckpointError("unusable")), unserved=True)
    with pytest.raises(UnservedError, match="a\nunusable"):
        refuse(check("a"), unusable)


def test_a_failure_of_our_own_is_no_message(refuse):
    with pytest.raises(KeyError):
        refuse(Check("broken", Stage.FLAGS, raising(KeyError("x"))))


@cache
def models():
    """Classes of SGLang's models by name: their parents and their text. Some import only on a GPU."""
    found = {}
    for file in Path(find_spec("sglang.srt.models").submodule_search_locations[0]).glob("*.py"):
        for text in re.split(r"^(?=class )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, parents = re.match(r"class (\w+)(?:\((.*?)\))?:", text, re.DOTALL).groups()
            found[name] = re.findall(r"\w+", parents or ""), text
    return found


def captures(architecture):
    """Return whether SGLang's own worker can ask the class, or a base of it, for hidden states."""
    parents, text = models().get(architecture, ((), ""))
    return bool(re.search(r"def set_(dflash|dspark)_layers_to_capture", text)) or any(map(captures, parents))


def test_an_unknown_target_is_told_of_sglangs_own():
    with pytest.raises(UnservedError, match="SGLang's own worker"):
        family_of(["NoSuchForCausalLM"])
    assert is_left_to_sglang(["NoSuchForCausalLM"]) and is_left_to_sglang(None)
    assert not is_left_to_sglang(["LlamaForCausalLM"])


@pytest.mark.parametrize("architecture", UNSERVED)
def test_what_no_dspark_serves_is_refused_with_the_reason(architecture):
    with pytest.raises(UnservedError) as caught:
        family_of([architecture])
    assert str(caught.value).endswith(UNSERVED[architecture])
    assert not is_left_to_sglang([architecture])
    assert architecture not in {family.architecture for family in FAMILIES}


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM"])
def test_what_is_left_to_sglang_can_be_asked_for_hidden_states(architecture):
    assert is_left_to_sglang([architecture]) and captures(architecture)


@pytest.mark.parametrize(
    ("backend", "is_ragged"), [("kda", True), ("gdn", False), ("short_conv", False), ("lightning", False)]
)
def test_recurrences_that_sglangs_own_worker_verifies_raggedly(backend, is_ragged):
    """The source of SGLang's backends agrees with what the list says of its own worker."""
    [folder] = find_spec("sglang.srt.layers.attention.linear").submodule_search_locations
    text = (Path(folder) / f"{backend}_backend.py").read_text(encoding="utf-8")
    assert ("supports_ragged_verify_graph: bool = True" in text) == is_ragged


# One of a kind: a dense target, experts, windows with sinks, two K/V pools, positions of three coordinates and states;
# both methods that return hidden states.
QUICK = (
    *("LlamaForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "Gemma4ForConditionalGeneration"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3_5ForCausalLM"),
)
ATOL = 2e-3  # of values of some tens; a neighbouring layer differs by ones


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_targets.py asks the same of a GPU, which rounds to 16 bits")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough])
        for name in (*(family.architecture for family in FAMILIES), GEMMA4_EXPERTS)
    ],
)
def test_states_and_greedy_texts(architecture, tmp_path):
    chosen = TINY[architecture].chosen
    model = write_target(architecture, tmp_path)
    with router_margins(model, chosen) as margins:
        texts = [Text(continued(model, prompt, NUM_TOKENS), len(prompt)) for prompt in PROMPTS]
    assert bool(margins) == bool(chosen)
    assert min(margins, default=1.0) > 1e-4, "experts are close: take another seed"
    assert len({tuple(text.ids[-NUM_TOKENS:]) for text in texts}) == len(texts)

    for text, answer in zip(texts, ask(tmp_path, texts), strict=True):
        logits, states = outputs_of(model, text.ids)
        best = logits.topk(2).values[text.prompt_len - 1 : -1]
        assert float((best[:, 0] - best[:, 1]).min()) > 5 * ATOL, "tokens are close: take another seed"
        expected = torch.cat([states[tap + 1] for tap in TAPS], dim=-1)
        torch.testing.assert_close(answer.features, expected[:-1], atol=ATOL, rtol=1e-4)
        assert answer.logits.argmax(-1).tolist() == text.ids[text.prompt_len :]


@contextmanager
def router_margins(model: Any, chosen: int) -> Iterator[list[float]]:
    """Collect, for every router and forward, how far the last expert that is chosen stands above the first that is not.

    In the scores by which the experts are chosen, before a softmax.
    """
    margins: list[float] = []

    def note(module: Any, args: Any, output: Any) -> None:
        rows = args[0].view(-1, module.weight.shape[1])
        scores = torch.nn.functional.linear(rows, module.weight, getattr(module, "bias", None))
        bias = getattr(module, "e_score_correction_bias", None)
        scores = scores if bias is None else scores.sigmoid() + bias
        best = scores.sort(-1, descending=True).values
        margins.append(float((best[:, chosen - 1] - best[:, chosen]).min()))

    names = ("mlp.gate", "mlp.router", "router.proj")
    routers = [module for name, module in model.named_modules() if name.endswith(names)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
