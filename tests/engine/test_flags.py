"""Tests that a new flag, request field, sampling parameter or route of SGLang is noticed.

Command lines that work without DSPARK start with it, on GPUs that are faked, and those of docker/ start.
"""

from __future__ import annotations

import ast
import json
import re
from argparse import ArgumentParser
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import yaml
from faked_gpu import GPUS, Pairs
from published_drafters import LINES, Line, counted
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang_objects import launch_context, server_args

from sglang_dspark.config import DSparkConfig, flag_dest
from sglang_dspark.engine import flags, http, requests
from sglang_dspark.engine.flags import OTHER_PREFIXES, all_rules, broken_rules
from sglang_dspark.engine.start import LENGTHS, block_size_from_flags
from sglang_dspark.errors import ConfigError

SNAPSHOT = Path(__file__).parents[1] / "data" / "sglang_names.json"
NAMES = {kind: set(names) for kind, names in json.loads(SNAPSHOT.read_text(encoding="utf-8")).items()}
OURS = {flag_dest(option.name) for option in fields(DSparkConfig)}


def routes():
    """Collect the routes of SGLang's HTTP servers from their decorators."""
    found = set()
    for file in Path(find_spec("sglang.srt.entrypoints").submodule_search_locations[0]).rglob("*.py"):
        if file.name == "engine_info_bootstrap_server.py":
            continue  # routes of another server
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found |= {path for path in map(_path_of, getattr(node, "decorator_list", [])) if path}
    return found


def _path_of(decorator):
    """Return the path of an ``@app.post("/path")``; None of other decorators."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute) or not decorator.args:
        return None
    path = decorator.args[0]
    if isinstance(path, ast.Call) and path.args:
        path = path.args[-1]  # the default of an environment variable
    path = getattr(path, "value", None)
    return path if isinstance(path, str) and path.startswith("/") else None


OF_SGLANG = {
    "flags": lambda: {field.name for field in record_fields(ServerArgs)} - OURS,
    "request_fields": lambda: {field.name for field in fields(GenerateReqInput)},
    "sampling_parameters": lambda: {field.name for field in msgspec.structs.fields(SamplingParams)},
    "routes": routes,
}


@pytest.mark.parametrize("kind", OF_SGLANG)
def test_every_name_of_sglang_has_been_looked_at(kind):
    """A new name may change the target's text, pass by our checks, or have no effect under DSPARK."""
    found = OF_SGLANG[kind]()
    new, gone = found - NAMES[kind], NAMES[kind] - found
    assert not new and not gone, (
        f"{kind}: new in SGLang: {sorted(new)}, gone: {sorted(gone)}. Read what each new one does; adjust or refuse "
        "it in engine/flags.py or engine/requests.py if DSPARK cannot serve it, or say in "
        f"docs/compatibility.md what else it does. Then write the names into {SNAPSHOT.name}."
    )


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("request_fields", requests.REFUSED_FIELDS),
        ("sampling_parameters", requests.REFUSED_PARAMETERS),
        ("routes", http.REFUSED_ROUTES + http.REFUSED_CHANGES),
    ],
)
def test_what_is_refused_exists(kind, refused):
    assert set(refused) <= NAMES[kind]


STARTS = (
    {},
    {"device": "cpu"},
    {"enable_lora": True},
    {"enable_lora": True, "device": "cpu"},
    {"target": {"architecture": "Qwen3_5ForCausalLM"}},
    {"target": {"is_hybrid_swa": True}},
)
"""Starts in one of which each rule holds."""


def start(**given):
    """A start whose attention SGLang chooses."""
    return launch_context(**{"prefill": None, "decode": None} | given)


@pytest.mark.parametrize("given", STARTS[:1] + STARTS[4:], ids=str)
def test_defaults_are_served(given):
    assert not [*broken_rules(start(**given), adjusts=True), *broken_rules(start(**given), adjusts=False)]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_other_values_are_adjusted_or_refused_by_name(rule):
    value = "megamoe" if rule.name == "moe_runner_backend" else "something"
    tried = [start(**given | {rule.name: value}) for given in STARTS]
    context = next(context for context in tried if rule.applies(context))
    assert rule in broken_rules(context, adjusts=rule.adjusts)
    assert rule not in broken_rules(context, adjusts=not rule.adjusts)
    flag = f"--{rule.name.replace('_', '-')}={value}"
    assert rule.refusal(context.args) == f"DSPARK cannot run with {flag}; {rule.reason}"
    if rule.adjusts:
        adjusted = [one.adjustment(context.args) for one in broken_rules(context, adjusts=True)]
        found = next(one for one in adjusted if (one.name, one.value) == (rule.name, rule.served[0]))
        instead = "is dropped" if rule.served[0] in (None, False) else f"becomes {rule.served[0]}"
        assert found.said == f"{flag} {instead}: {rule.reason}"
        setattr(context.args, found.name, found.value)
        assert rule.serves(context.args)


@pytest.mark.parametrize("prefix", OTHER_PREFIXES)
def test_what_only_other_algorithms_read_exists(prefix):
    assert any(name.startswith(prefix) for name in NAMES["flags"])


TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}


@pytest.mark.parametrize(
    ("given", "ours", "most", "drafts"),
    [
        ({}, None, 7, None),
        ({"speculative_num_steps": 1, "speculative_eagle_topk": 1}, None, 7, None),
        ({"speculative_dflash_block_size": 8}, None, 15, 7),
        ({"speculative_dflash_block_size": 16}, None, 7, 7),
        ({"speculative_dflash_block_size": 4, "speculative_num_draft_tokens": 8}, None, 7, 3),
        ({"speculative_num_draft_tokens": 8}, None, None, 7),
        ({"speculative_num_draft_tokens": 1}, None, 7, 1),
        ({"speculative_num_draft_tokens": 5, "speculative_num_steps": 1}, None, 7, 4),
        (TREE, None, 7, 3),
        ({**TREE, "speculative_num_steps": None}, None, 7, None),
        ({"speculative_num_draft_tokens": 4}, 5, 7, 5),
    ],
    ids=str,
)
def test_how_long_flags_of_other_algorithms_make_a_block(given, ours, most, drafts):
    args = server_args(**given)
    config, found = block_size_from_flags(args, DSparkConfig(block_size=ours), most)
    assert config.block_size == drafts
    named = {name for name, value in given.items() if name in LENGTHS and value not in (None, 1)}
    named |= {"speculative_num_draft_tokens"} & given.keys()
    assert {one.name for one in found} == named and all(one.value is None for one in found)
    for one in found:
        length = drafts or "the drafter's"
        assert f"={given[one.name]} becomes --speculative-dspark-block-size={length}: DSPARK" in one.said


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


def documented():
    for row in ROWS:
        kind, *cells = row.strip("| ").split(" | ")
        for column, cell in zip(COLUMNS, cells, strict=True):
            for gpu in sorted(set(column.split(", ")) & set(GPUS)):
                yield from ((gpu, architecture, cell.strip("`")) for architecture in KINDS[kind])


@pytest.mark.usefixtures("unhooked")
def test_every_generation_and_kind_is_documented():
    assert {gpu for gpu, _, _ in documented()} == set(GPUS)
    assert {architecture for _, architecture, _ in documented()} == {name for names in KINDS.values() for name in names}


@pytest.mark.usefixtures("unhooked")
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


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("line", [*LINES, *FLAGS], ids=lambda line: line.source or line.flags)
def test_a_command_line_that_works_starts_with_dspark(pairs, line):
    chosen = line.plain(pairs)
    if line.refused:
        with pytest.raises(ConfigError, match=f"^DSPARK cannot run with --{line.refused}=[^\n]*$"):
            line.with_dspark(pairs)
    else:
        found = starts(pairs, line)
        assert (found.prefill, found.page_size) == (chosen.prefill, chosen.page_size)


@pytest.mark.usefixtures("unhooked")
def test_the_committed_counts_are_these():
    result = json.loads((ROOT / "benchmarks" / "results" / "command_lines.json").read_text())
    assert [(row["source"], row["flags"], row["now"]["starts"]) for row in result["command_lines"]] == [
        (line.source, line.flags, not line.refused) for line in LINES
    ]
    said = "Of [{lines} published command lines]({file}) for SGLang, {start_now} start with DSPARK; before flags were "
    said += "adjusted, {start_before} started."
    assert said.format(file="../benchmarks/results/command_lines.json", **result) in WORDS


@pytest.mark.usefixtures("unhooked")
def test_the_document_counts_flags():
    found = counted()
    said = "Of SGLang's {flags} flags, {served} work unchanged, {adjusted} are **adjusted**, {refused} are **refused** "
    said += "with some of their values, and `--moe-a2a-backend` is adjusted or refused."
    assert said.format(**found) in WORDS
    assert found["either"] == 1
    assert found["flags"] == sum(found[kind] for kind in ("served", "adjusted", "refused", "either"))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_the_announcement_of_dflash_starts_with_dspark(pairs, monkeypatch, architecture):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    adjusted = "speculative-draft-attention-backend speculative-dflash-block-size cuda-graph-backend-prefill"
    assert starts(pairs, Line("", B200, architecture, ANNOUNCED, adjusted))[:3] == ("trtllm_mha", "trtllm_mha", 64)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pp-size 2", "--pp-size=2; pass 1"),
        ("--rl-on-policy-target fsdp", "it rounds as one trainer does"),
        ("--attention-backend hpc_ops --enable-return-indexer-topk", "--enable-return-indexer-topk=True; drop"),
    ],
)
def test_what_would_be_wrong_is_refused(pairs, flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        pairs.resolve("Hopper", "Qwen3MoeForCausalLM", *flags.split())


@pytest.mark.usefixtures("unhooked")
def test_the_same_bits_are_served_on_a_gpu(pairs):
    """With the prefix cache, and prompts outside of SGLang's graphs."""
    found, server = pairs.view("Hopper", "Qwen3ForCausalLM", "--enable-deterministic-inference")
    assert (found.attention_backend, found.page_size, server.same_bits) == ("triton", 1, True)
    assert found.enable_deterministic_inference and not found.disable_radix_cache
    assert found.cuda_graph_config.prefill.backend == "disabled"


DOCKER = Path(__file__).parents[2] / "docker"
# What SGLang's controller of two_nodes.yaml tells a worker, and what whoever runs the examples has to choose.
VALUES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "dspark-two-nodes-0.dspark-two-nodes",
    "TARGET": "my/target",
    "DRAFT": "my/drafter",
}


def commands():
    """Arguments of every server, by where they were found."""
    for path in sorted([*DOCKER.glob("compose*.yaml"), *(DOCKER / "kubernetes").glob("*.yaml")]):
        for place, document in enumerate(yaml.safe_load_all(path.read_text())):
            lists = {tuple(words) for words in argument_lists(document) if "--speculative-algorithm" in words}
            for words in lists:  # one, which several containers may share
                yield pytest.param(words, id=f"{path.name}-{place}")


def argument_lists(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("command", "args"):
                yield [str(word) for word in value]
            else:
                yield from argument_lists(value)
    elif isinstance(node, list):
        for value in node:
            yield from argument_lists(value)


def filled(word):
    """A word without variables, of compose (``${TARGET:-default}``) or of Kubernetes (``$(TARGET)``)."""
    return re.sub(r"\$[({]([A-Z_]+)[^)}]*[)}]", lambda match: VALUES[match[1]], word)


COMMANDS = list(commands())


def test_every_example_has_been_found():
    assert {param.id.split("-")[0] for param in COMMANDS} == {
        "compose.yaml",
        "compose.replicas.yaml",
        "replicas.yaml",
        "two_nodes.yaml",
    }


@pytest.mark.parametrize("words", COMMANDS)
def test_every_flag_is_known_and_served(words):
    parser = ArgumentParser(exit_on_error=False)
    load_plugins()
    ServerArgs.add_cli_args(parser)
    args, unknown = parser.parse_known_args([filled(word) for word in words])
    assert unknown == []
    assert [rule for rule in flags.all_rules() if not rule.serves(args) and rule.name != "lora_backend"] == []
    assert args.speculative_algorithm == "DSPARK"
    if args.nnodes > 1:
        assert args.tp_size % args.nnodes == 0 and ":" in args.dist_init_addr and args.node_rank == 1
