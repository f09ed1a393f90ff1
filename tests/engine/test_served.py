"""Every flag and request field of SGLang is on the list of what is served."""

import ast
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_dspark.config import DSparkConfig, flag_dest
from sglang_dspark.engine.api import served_requests
from sglang_dspark.engine.startup import served
from sglang_dspark.tools.sglang_flags import table

PAGE = Path(__file__).parents[2] / "docs" / "sglang_flags.md"
FLAGS = [
    *(refusal.name for refusal in served.REFUSED_FLAGS),
    *served.CHECKED_ELSEWHERE,
    *served.SERVED_FLAGS,
    *served.OTHER_MODELS_FLAGS,
    *served.REFUSED_FEATURES_FLAGS,
]
FIELDS = [
    *served_requests.REFUSED_FIELDS,
    *served_requests.SERVED_FIELDS,
    *served_requests.OTHER_MODELS_FIELDS,
    *served_requests.REFUSED_FEATURES_FIELDS,
]

ROUTES = [*served_requests.SERVED_ROUTES, *served_requests.REFUSED_ROUTES, *served_requests.REFUSED_CHANGES]
OURS = {flag_dest(knob.name) for knob in fields(DSparkConfig)}


@pytest.mark.parametrize(
    ("listed", "of_sglang"),
    [
        ([*FLAGS, *served.COMPUTED_FIELDS], {field.name for field in record_fields(ServerArgs)} - OURS),
        (FIELDS, {field.name for field in fields(GenerateReqInput)}),
        (
            [*served_requests.SAMPLING_PARAMETERS, *served_requests.REFUSED_PARAMETERS],
            {field.name for field in msgspec.structs.fields(SamplingParams)},
        ),
    ],
    ids=["flags", "fields", "sampling_parameters"],
)
def test_every_name_of_sglang_has_been_looked_at(listed, of_sglang):
    """Where this fails on a new SGLang: look at what the new one does, then put it where it belongs."""
    assert len(of_sglang) > 10
    assert sorted(listed) == sorted(of_sglang)


def test_every_route_of_sglang_has_been_looked_at():
    """A new one may change the target, or take requests that nobody checks."""
    found = set()
    for file in Path(find_spec("sglang.srt.entrypoints").submodule_search_locations[0]).rglob("*.py"):
        if file.name == "engine_info_bootstrap_server.py":
            continue  # routes of another server
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found |= {path for path in map(_path_of, getattr(node, "decorator_list", [])) if path}
    assert len(found) > 50
    assert sorted(found - {*ROUTES}) == []
    assert len(ROUTES) == len(set(ROUTES))


def _path_of(decorator):
    """What an ``@app.post("/path")`` serves; None of other decorators."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute) or not decorator.args:
        return None
    path = decorator.args[0]
    if isinstance(path, ast.Call) and path.args:
        path = path.args[-1]  # the default of an environment variable
    path = getattr(path, "value", None)
    return path if isinstance(path, str) and path.startswith("/") else None


def test_the_page_is_that_of_the_lists():
    """``python -m sglang_dspark.tools.sglang_flags > docs/sglang_flags.md`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == table()


DEFAULTS = {field.name: field.default for field in record_fields(ServerArgs)} | {"grammar_backend": "xgrammar"}


@pytest.mark.parametrize("refusal", served.REFUSED_FLAGS, ids=lambda refusal: refusal.name)
def test_defaults_are_served_and_other_values_refused_by_name(refusal):
    defaults = SimpleNamespace(**DEFAULTS)
    assert list(served.refusals(defaults, defaults)) == []
    flag = "--" + refusal.name.replace("_", "-")
    given = SimpleNamespace(**{**DEFAULTS, refusal.name: "something"})
    assert list(served.refusals(given, defaults)) == [f"DSPARK cannot run with {flag}=something; {refusal.remedy}"]
    assert list(served.refusals(defaults, given)) == [f"DSPARK cannot run with {flag}=something; {refusal.remedy}"]
