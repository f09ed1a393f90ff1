"""A new name of SGLang is noticed: flag, request field, sampling parameter or route. What is refused is named."""

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
from sglang_objects import server_args

from sglang_dspark.config import DSparkConfig, flag_dest
from sglang_dspark.engine.api import served_requests
from sglang_dspark.engine.launch import flag_rules

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
        f"{kind}: new in SGLang: {sorted(new)}, gone: {sorted(gone)}. Read what each new one does; refuse it in "
        "engine/launch/flag_rules.py or engine/api/served_requests.py if DSPARK cannot serve it, or say in "
        f"docs/compatibility.md what else it does. Then write the names into {SNAPSHOT.name}."
    )


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("request_fields", served_requests.REFUSED_FIELDS),
        ("sampling_parameters", served_requests.REFUSED_PARAMETERS),
        ("routes", served_requests.REFUSED_ROUTES + served_requests.REFUSED_CHANGES),
    ],
)
def test_what_is_refused_exists(kind, refused):
    assert set(refused) <= NAMES[kind]


def given(**changed):
    return server_args(**{"grammar_backend": "xgrammar"} | changed)


@pytest.mark.parametrize("rule", flag_rules.all_rules(), ids=lambda rule: rule.name)
def test_defaults_are_served_and_other_values_refused_by_name(rule):
    assert list(flag_rules.refusals(given(), given())) == []
    message = f"DSPARK cannot run with --{rule.name.replace('_', '-')}=something; {rule.remedy}"
    for pair in ((given(**{rule.name: "something"}), given()), (given(), given(**{rule.name: "something"}))):
        assert list(flag_rules.refusals(*pair)) == [message]


def test_flags_without_effect_are_named():
    unread = {"speculative_ngram_capacity": 5, "uno_lora_path": "here", "decoupled_spec_rank": 1}
    assert flag_rules.unread(given()) == []
    found = flag_rules.unread(given(**unread, decoupled_spec_role="drafter", pp_size=2))
    assert set(found) == {"--speculative-ngram-capacity", "--uno-lora-path", "--decoupled-spec-rank"}


@pytest.mark.parametrize("prefix", flag_rules.UNREAD)
def test_flags_without_effect_exist(prefix):
    assert any(name.startswith(prefix) for name in NAMES["flags"])
