"""A new name of SGLang is noticed: flag, request field, sampling parameter or route. What is not served is named."""

import ast
import json
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang_objects import launch_context, server_args

from sglang_dspark.config import DSparkConfig, flag_dest
from sglang_dspark.engine import http, requests
from sglang_dspark.engine.flags import PREFIXES, all_rules, broken
from sglang_dspark.engine.start import LENGTHS, of_lengths, of_rules

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
    assert not [*broken(start(**given), adjusts=True), *broken(start(**given), adjusts=False)]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_other_values_are_adjusted_or_refused_by_name(rule):
    value = "megamoe" if rule.name == "moe_runner_backend" else "something"
    tried = [start(**given | {rule.name: value}) for given in STARTS]
    context = next(context for context in tried if rule.beside(context))
    assert rule in broken(context, adjusts=rule.adjusts)
    assert rule not in broken(context, adjusts=not rule.adjusts)
    flag = f"--{rule.name.replace('_', '-')}={value}"
    assert rule.refusal(context.args) == f"DSPARK cannot run with {flag}; {rule.reason}"
    if rule.adjusts:
        [found] = [found for found in of_rules(context) if (found.name, found.value) == (rule.name, rule.served[0])][:1]
        assert found.said == f"{flag} becomes {rule.served[0]}: {rule.reason}"
        setattr(context.args, found.name, found.value)
        assert rule.serves(context.args)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_other_algorithms_alone_read_exists(prefix):
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
    config, found = of_lengths(args, DSparkConfig(block_size=ours), most)
    assert config.block_size == drafts
    named = {name for name, value in given.items() if name in LENGTHS and value not in (None, 1)}
    named |= {"speculative_num_draft_tokens"} & given.keys()
    assert {one.name for one in found} == named and all(one.value is None for one in found)
    for one in found:
        length = drafts or "the drafter's"
        assert f"={given[one.name]} becomes --speculative-dspark-block-size={length}: a block" in one.said
