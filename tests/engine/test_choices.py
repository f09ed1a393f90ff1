"""Command lines that work without DSPARK start with it, and SGLang chooses the same for both. GPUs are faked."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from faked_gpu import GPUS, Pairs
from sglang.srt.plugins import load_plugins

from sglang_dspark.engine.launch import hooks
from sglang_dspark.errors import ConfigError

TEXT = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
[HEAD, _, *ROWS] = re.search(r"^\| attention of prompts \|(?:.*\n)+?\n", TEXT, re.MULTILINE)[0].strip().splitlines()
COLUMNS = HEAD.strip("| ").split(" | ")[1:]
PAGES = {"trtllm_mha": 64}
KINDS = {  # rows of the table, and classes for each
    "most": ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "gpt-oss": ("GptOssForCausalLM",),
    "Gemma 4": ("Gemma4ForConditionalGeneration",),
    "Qwen3-Next, Qwen3.5 with images": ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"),
}


B200 = "B200"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    load_plugins()
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def unhooked(monkeypatch):
    """SGLang leaves variables behind, of states for instance, that later processes would read."""
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    with patch.dict(os.environ):
        yield


def documented():
    for row in ROWS:
        kind, *cells = row.strip("| ").split(" | ")
        for column, cell in zip(COLUMNS, cells, strict=True):
            for gpu in sorted(set(column.split(", ")) & set(GPUS)):
                yield from ((gpu, architecture, cell.strip("`")) for architecture in KINDS[kind])


def test_every_generation_and_kind_is_documented():
    assert {gpu for gpu, _, _ in documented()} == set(GPUS)
    assert {architecture for _, architecture, _ in documented()} == {name for names in KINDS.values() for name in names}


@pytest.mark.parametrize(("gpu", "architecture", "backend"), documented())
@pytest.mark.parametrize("flags", [(), ("--page-size", "32")], ids=["plain", "in pages"])
def test_sglang_chooses_as_for_a_plain_server(pairs, gpu, architecture, backend, flags):
    ours, plain = (pairs.resolve(gpu, architecture, *flags, with_dspark=asked) for asked in (True, False))
    assert ours == plain
    if not flags:
        assert ours == (backend, backend, PAGES.get(backend, 1), ())


# What operators type for servers without DSPARK or with other speculation, and the flags that DSPARK changes.
CHAINS = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREES = "--speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32"
LENGTHS = "speculative-num-steps speculative-num-draft-tokens"
COMMANDS = [
    (
        "Hopper",
        "LlamaForCausalLM",
        "--tp 4 --mem-fraction-static 0.85 --context-length 1024 --chunked-prefill-size 8192 --enable-metrics",
        "",
    ),
    ("Hopper", "LlamaForCausalLM", "--schedule-conservativeness 0.3 --schedule-policy lpm --log-level warning", ""),
    ("Ampere", "LlamaForCausalLM", "--enable-torch-compile --cuda-graph-max-bs-decode 24", "enable-torch-compile"),
    (
        "Ada",
        "Qwen3ForCausalLM",
        "--attention-backend flashinfer --sampling-backend flashinfer --enable-mixed-chunk",
        "sampling-backend",
    ),
    (
        "Hopper",
        "Qwen3ForCausalLM",
        "--quantization fp8 --kv-cache-dtype fp8_e4m3 --reasoning-parser qwen3 --tool-call-parser qwen25",
        "",
    ),
    ("Ada", "Qwen3ForCausalLM", "--kv-cache-dtype fp8_e5m2 --max-running-requests 64 --trust-remote-code", ""),
    (
        "Hopper",
        "Qwen3MoeForCausalLM",
        "--tp 8 --ep-size 8 --moe-a2a-backend deepep --deepep-mode auto --stream-interval 4",
        "moe-a2a-backend",
    ),
    (
        "Hopper",
        "GptOssForCausalLM",
        f"--tp 4 --reasoning-parser gpt-oss --tool-call-parser gpt-oss --dtype bfloat16 {CHAINS}",
        LENGTHS,
    ),
    (B200, "GptOssForCausalLM", "--attention-backend triton --mem-fraction-static 0.9 --max-prefill-tokens 4096", ""),
    (
        B200,
        "Gemma4ForConditionalGeneration",
        "--tp 2 --reasoning-parser gemma4 --tool-call-parser gemma4 --prefill-attention-backend trtllm_mha",
        "",
    ),
    (
        "Hopper",
        "Qwen3NextForCausalLM",
        f"--tp 4 --mamba-radix-cache-strategy extra_buffer_lazy --mamba-ssm-dtype bfloat16 {CHAINS}",
        f"mamba-radix-cache-strategy {LENGTHS}",
    ),
    ("Hopper", "Glm4MoeForCausalLM", f"--tp 8 --tool-call-parser glm45 --reasoning-parser glm45 {CHAINS}", LENGTHS),
    (
        "Ampere",
        "LlamaForCausalLM",
        f"--dtype float16 --cuda-graph-max-bs-decode 2 --mem-fraction-static 0.7 {TREES}",
        f"speculative-eagle-topk {LENGTHS}",
    ),
    (
        "Hopper",
        "LlamaForCausalLM",
        "--page-size 64 --enable-hierarchical-cache --hicache-ratio 2 --hicache-storage-backend file",
        "hicache-storage-backend",
    ),
    ("Hopper", "GptOssForCausalLM", "--enable-hierarchical-cache --hicache-size 30", "enable-hierarchical-cache"),
    (
        B200,
        "Qwen3ForCausalLM",
        "--prefill-attention-backend fa4 --decode-attention-backend trtllm_mha --num-continuous-decode-steps 2",
        "decode-attention-backend num-continuous-decode-steps",
    ),
    (
        "RTX 50",
        "Qwen3VLForConditionalGeneration",
        "--enable-multimodal --mm-attention-backend triton_attn --cuda-graph-bs-decode 1 2 4 8",
        "",
    ),
    ("Hopper", "Qwen3ForCausalLM", "--enable-lora --max-lora-rank 16 --lora-target-modules q_proj v_proj", ""),
]
ANNOUNCED = (
    "--tp-size 8 --attention-backend trtllm_mha --speculative-draft-attention-backend fa4 "
    "--linear-attn-prefill-backend triton --linear-attn-decode-backend flashinfer --mamba-ssm-dtype bfloat16 "
    "--mamba-radix-cache-strategy extra_buffer --speculative-dflash-block-size 8 --cuda-graph-backend-prefill full "
    "--enable-flashinfer-allreduce-fusion"
)
"""The flags with which DFlash was announced for a Qwen3.5 on eight B200; this SGLang has no graphs ``tc_piecewise``."""


def starts(pairs, gpu, architecture, flags, adjusted):
    """A command line is started with DSPARK, and what is changed of it is named."""
    found = pairs.resolve(gpu, architecture, *flags.split())
    assert {said.split("=")[0] for said in found.adjusted} == {f"--{name}" for name in adjusted.split()}
    assert found.prefill == found.decode
    return found


@pytest.mark.parametrize(("gpu", "architecture", "flags", "adjusted"), COMMANDS)
def test_a_command_line_that_works_starts_with_dspark(pairs, gpu, architecture, flags, adjusted):
    plain = " ".join(re.sub(rf"{CHAINS}|{TREES}", "", flags).split())
    chosen = pairs.resolve(gpu, architecture, *plain.split(), with_dspark=False)
    found = starts(pairs, gpu, architecture, flags, adjusted)
    assert (found.prefill, found.page_size) == (chosen.prefill, chosen.page_size)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_the_announcement_of_dflash_starts_with_dspark(pairs, monkeypatch, architecture):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    adjusted = "speculative-draft-attention-backend speculative-dflash-block-size cuda-graph-backend-prefill"
    assert starts(pairs, B200, architecture, ANNOUNCED, adjusted)[:3] == ("trtllm_mha", "trtllm_mha", 64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pp-size 2", "--pp-size=2; pass 1"),
        ("--enable-deterministic-inference", "requests with a seed are reproducible but for that"),
        ("--attention-backend hpc_ops --enable-return-indexer-topk", "--enable-return-indexer-topk=True; drop"),
    ],
)
def test_what_would_be_wrong_is_refused(pairs, flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        pairs.resolve("Hopper", "Qwen3MoeForCausalLM", *flags.split())
