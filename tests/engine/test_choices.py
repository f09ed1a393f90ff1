"""Command lines that work without DSPARK start with it, and SGLang chooses the same for both. GPUs are faked."""

import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from faked_gpu import GPUS, Pairs
from public_commands import LINES, Line, counted
from sglang.srt.plugins import load_plugins

from sglang_dspark.engine import hooks
from sglang_dspark.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())
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


FLAGS = [  # that no public command line of ours has
    Line("", "Ada", "Qwen3ForCausalLM", "--kv-cache-dtype fp8_e5m2 --enable-mixed-chunk"),
    Line(
        "",
        B200,
        "Qwen3ForCausalLM",
        "--prefill-attention-backend fa4 --decode-attention-backend trtllm_mha --num-continuous-decode-steps 2",
        "decode-attention-backend num-continuous-decode-steps",
    ),
    Line("", B200, "Gemma4ForConditionalGeneration", "--tp 2 --prefill-attention-backend trtllm_mha"),
]
ANNOUNCED = (
    "--tp-size 8 --attention-backend trtllm_mha --speculative-draft-attention-backend fa4 "
    "--linear-attn-prefill-backend triton --linear-attn-decode-backend flashinfer --mamba-ssm-dtype bfloat16 "
    "--mamba-radix-cache-strategy extra_buffer --speculative-dflash-block-size 8 --cuda-graph-backend-prefill full "
    "--enable-flashinfer-allreduce-fusion"
)
"""The flags with which DFlash was announced for a Qwen3.5 on eight B200; this SGLang has no graphs ``tc_piecewise``."""


def starts(pairs, line):
    """A command line is started with DSPARK, and what is changed of it is named."""
    found = line.with_dspark(pairs)
    assert {said.split("=")[0] for said in found.adjusted} == {f"--{name}" for name in line.adjusted.split()}
    assert found.prefill == found.decode
    return found


@pytest.mark.parametrize("line", [*LINES, *FLAGS], ids=lambda line: line.source or line.flags)
def test_a_command_line_that_works_starts_with_dspark(pairs, line):
    chosen = line.plain(pairs)
    if line.refused:
        with pytest.raises(ConfigError, match=f"^DSPARK cannot run with --{line.refused}=[^\n]*$"):
            line.with_dspark(pairs)
    else:
        found = starts(pairs, line)
        assert (found.prefill, found.page_size) == (chosen.prefill, chosen.page_size)


def test_the_committed_counts_are_these():
    result = json.loads((ROOT / "benchmarks" / "results" / "command_lines.json").read_text())
    assert [(row["source"], row["flags"], row["now"]["starts"]) for row in result["command_lines"]] == [
        (line.source, line.flags, not line.refused) for line in LINES
    ]
    said = "[{lines} published command lines]({file}), {start_now} start; {start_before} did"
    assert said.format(file="../benchmarks/results/command_lines.json", **result) in WORDS


def test_the_document_counts_flags():
    said = "{served} of SGLang's {flags} flags work unchanged. {adjusted} flags that only affect speed are **adjusted**"
    assert said.format(**counted()) in WORDS
    assert "{refused} flags are **refused**".format(**counted()) in WORDS


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_the_announcement_of_dflash_starts_with_dspark(pairs, monkeypatch, architecture):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    adjusted = "speculative-draft-attention-backend speculative-dflash-block-size cuda-graph-backend-prefill"
    assert starts(pairs, Line("", B200, architecture, ANNOUNCED, adjusted))[:3] == ("trtllm_mha", "trtllm_mha", 64)


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
