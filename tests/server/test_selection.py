"""Who answers to DSPARK, on releases of SGLang with and without a DSPARK of their own. No server is started."""

from __future__ import annotations

import pytest
from golden_server import DRAFT, TARGET

from sglang_dspark.engine.startup.names import ALGORITHM, COMMON_NAME

HAS_BUILT_IN = ALGORITHM != COMMON_NAME
BASE = ["--model-path", str(TARGET), "--device", "cpu", "--disable-cuda-graph"]
PAIR = [*BASE, "--speculative-draft-model-path", str(DRAFT)]
DSPARK = [*PAIR, "--speculative-algorithm", "DSPARK"]
PLUGIN = [*DSPARK, "--speculative-dspark-engine", "plugin"]
BLOCK = ["--speculative-dspark-block-size", "3"]
OTHER_TARGET = ["--json-model-override-args", '{"vocab_size": 300}']

# flags, environment, release that SGLang says it is; and what comes of it where SGLang has no DSPARK, and where it has.
SERVED = "plugin: 8 tokens, auto, cpu"
BUILT_IN = "ValueError: DSpark speculative decoding only supports CUDA"
CASES = {
    "plain": (BASE, {}, None, "plain", "plain"),
    "DSPARK": (DSPARK, {}, None, SERVED, BUILT_IN),
    "lower case": ([*PAIR, "--speculative-algorithm", "dspark"], {}, None, SERVED, BUILT_IN),
    "plugin by flag": (PLUGIN, {}, None, SERVED, SERVED),
    "plugin by variable": (DSPARK, {"SGLANG_DSPARK_ENGINE": "plugin"}, None, SERVED, SERVED),
    "plugin by its name": ([*PAIR, "--speculative-algorithm", ALGORITHM], {}, None, SERVED, SERVED),
    "built-in by flag": (
        [*DSPARK, "--speculative-dspark-engine", "builtin"],
        {},
        None,
        "ConfigError: --speculative-dspark-engine=builtin: sglang",
        BUILT_IN,
    ),
    "neither": (
        [*DSPARK, "--speculative-dspark-engine", "auto"],
        {},
        None,
        "ConfigError: --speculative-dspark-engine='auto'",
        "ConfigError: --speculative-dspark-engine='auto'",
    ),
    "an option of the plugin for the built-in": (
        [*DSPARK, "--speculative-dspark-schedule", "static"],
        {},
        None,
        "plugin: 8 tokens, static, cpu",
        "ConfigError: --speculative-dspark-schedule=static belongs to the plugin",
    ),
    "an option of both": ([*PLUGIN, *BLOCK], {}, None, "plugin: 4 tokens, auto, cpu", "plugin: 4 tokens, auto, cpu"),
    "a variable of the built-in": (
        PLUGIN,
        {"SGLANG_DSPARK_FAST_KERNEL": "0"},
        None,
        "ConfigError: unknown environment variable SGLANG_DSPARK_FAST_KERNEL",
        SERVED,
    ),
    "a quantised target": ([*PLUGIN, "--quantization", "fp8"], {}, None, SERVED, SERVED),
    "an unknown release": (
        PLUGIN,
        {},
        "0.5.99",
        "EngineError: sglang 0.5.99 is installed; sglang-dspark drives",
        "EngineError: sglang 0.5.99 is installed; sglang-dspark drives",
    ),
    "an unknown release on request": (
        [*PLUGIN, "--speculative-dspark-untested-sglang"],
        {},
        "0.5.99",
        SERVED,
        SERVED,
    ),
    "an unknown release without DSPARK": (BASE, {}, "0.5.99", "plain", "plain"),
    "target only": (
        [*PLUGIN, *BLOCK, "--speculative-dspark-fallback", "target-only", *OTHER_TARGET],
        {},
        None,
        f"target only: {DRAFT / 'config.json'}: vocab_size=256, but the target has vocab_size=300",
        f"target only: {DRAFT / 'config.json'}: vocab_size=256, but the target has vocab_size=300",
    ),
}
SCRIPT = """
import json, os, pickle, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_dspark.engine import settled, support
from sglang_dspark.engine.compat import arguments
installed = support.installed_sglang

def outcome(args):
    getattr(args, "resolve_once", lambda: None)()
    args = pickle.loads(pickle.dumps(args))
    view, found = arguments.resolved(args), arguments.attached(args)
    if found is None:
        return "plain" if view.speculative_algorithm is None else view.speculative_algorithm
    if isinstance(found, settled.TargetOnly):
        given = [f.name for f in arguments.fields() if f.name.startswith("speculative_")]
        assert all(getattr(args, name) != 3 for name in given), "what was asked of the drafter stayed"
        return f"target only: {found.reason}"
    return f"plugin: {view.speculative_num_draft_tokens} tokens, {found.config.schedule}, {view.device}"

for flags, variables, release in json.loads(sys.argv[1]):
    support.installed_sglang = (lambda release=release: release) if release else installed
    os.environ.update(variables)
    try:
        if isinstance(flags, dict):
            said = outcome(ServerArgs(**flags))
        else:
            said = outcome(prepare_server_args(flags))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    for name in variables:
        del os.environ[name]
    print(json.dumps(said))
"""
OFFLINE = {
    "model_path": str(TARGET),
    "device": "cpu",
    "disable_cuda_graph": True,
    "attention_backend": "torch_native",
    "speculative_algorithm": "DSPARK",
    "speculative_draft_model_path": str(DRAFT),
}


@pytest.fixture(scope="module")
def said(server_pool):
    """What became of every case, and of arguments made by a program; one process tries all of them."""
    cases = [list(case[:3]) for case in CASES.values()] + [[OFFLINE, {"SGLANG_DSPARK_ENGINE": "plugin"}, None]]
    return dict(zip([*CASES, "offline"], server_pool.printed_by(SCRIPT, cases), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_who_answers(said, name):
    assert said[name].startswith(CASES[name][4 if HAS_BUILT_IN else 3])


def test_arguments_made_by_a_program(said):
    assert said["offline"] == SERVED
