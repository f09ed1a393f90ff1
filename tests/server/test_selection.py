"""Whose DSPARK a server has: the plugin's, unless SGLang's own is asked for. No server is started."""

from __future__ import annotations

import pytest
from golden_server import DRAFT, TARGET

BASE = ["--model-path", str(TARGET), "--device", "cpu", "--disable-cuda-graph"]
PAIR = [*BASE, "--speculative-draft-model-path", str(DRAFT)]
DSPARK = [*PAIR, "--speculative-algorithm", "DSPARK"]
BUILT_IN = [*DSPARK, "--speculative-dspark-engine", "builtin"]
BLOCK = ["--speculative-dspark-block-size", "3"]
OTHER_TARGET = ["--json-model-override-args", '{"vocab_size": 300}']

# flags, environment, release that SGLang says it is; and what comes of it.
SERVED = "plugin: 8 tokens, auto, cpu"
OF_SGLANG = "ValueError: DSpark speculative decoding only supports CUDA"
CASES = {
    "plain": (BASE, {}, None, "plain"),
    "DSPARK": (DSPARK, {}, None, SERVED),
    "lower case": ([*PAIR, "--speculative-algorithm", "dspark"], {}, None, SERVED),
    "plugin by flag": ([*DSPARK, "--speculative-dspark-engine", "plugin"], {}, None, SERVED),
    "plugin by its name": ([*PAIR, "--speculative-algorithm", "DSPARK_PLUGIN"], {}, None, SERVED),
    "built-in by flag": (BUILT_IN, {}, None, OF_SGLANG),
    "built-in by variable": (DSPARK, {"SGLANG_DSPARK_ENGINE": "builtin"}, None, OF_SGLANG),
    "the flag counts": (
        [*DSPARK, "--speculative-dspark-engine", "plugin"],
        {"SGLANG_DSPARK_ENGINE": "builtin"},
        None,
        SERVED,
    ),
    "neither": (
        [*DSPARK, "--speculative-dspark-engine", "auto"],
        {},
        None,
        "ConfigError: --speculative-dspark-engine='auto': must be one of plugin, builtin",
    ),
    "both": (
        [*PAIR, "--speculative-algorithm", "DSPARK_PLUGIN", "--speculative-dspark-engine", "builtin"],
        {},
        None,
        "ConfigError: --speculative-algorithm DSPARK_PLUGIN is the plugin, and --speculative-dspark-engine=builtin",
    ),
    "an option of the plugin for the built-in": (
        [*BUILT_IN, "--speculative-dspark-schedule", "static"],
        {},
        None,
        "ConfigError: --speculative-dspark-schedule=static belongs to the plugin, and --speculative-dspark-engine",
    ),
    "an option of both": ([*DSPARK, *BLOCK], {}, None, "plugin: 4 tokens, auto, cpu"),
    "an option of both for the built-in": ([*BUILT_IN, *BLOCK], {}, None, OF_SGLANG),
    "a variable of the built-in": (DSPARK, {"SGLANG_DSPARK_FAST_KERNEL": "0"}, None, SERVED),
    "a quantised target": ([*DSPARK, "--quantization", "fp8"], {}, None, SERVED),
    "an unknown release": (
        DSPARK,
        {},
        "0.5.99",
        "EngineError: sglang 0.5.99 is installed; sglang-dspark drives",
    ),
    "an unknown release on request": ([*DSPARK, "--speculative-dspark-untested-sglang"], {}, "0.5.99", SERVED),
    "an unknown release without DSPARK": (BASE, {}, "0.5.99", "plain"),
    "an unknown release with its own": (BUILT_IN, {}, "0.5.99", OF_SGLANG),
    "target only": (
        [*DSPARK, *BLOCK, "--speculative-dspark-fallback", "target-only", *OTHER_TARGET],
        {},
        None,
        f"target only: {DRAFT / 'config.json'}: vocab_size=256, but the target has vocab_size=300",
    ),
}
SCRIPT = """
import json, os, pickle, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_dspark.engine import launch_state, support
from sglang_dspark.engine.compat import arguments
installed = support.installed_sglang

def outcome(args):
    args.resolve_once()
    args = pickle.loads(pickle.dumps(args))
    view, found = resolving_view(args), arguments.attached(args)
    if found is None:
        return "plain" if view.speculative_algorithm is None else view.speculative_algorithm
    if isinstance(found, launch_state.TargetOnly):
        given = [f.name for f in record_fields(ServerArgs) if f.name.startswith("speculative_")]
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


OFFLINE_CASES = {
    "offline": (OFFLINE, {}, None),
    "offline, built-in": (OFFLINE, {"SGLANG_DSPARK_ENGINE": "builtin"}, None),
}


@pytest.fixture(scope="module")
def said(server_pool):
    """What became of every case, and of arguments made by a program; one process tries all of them."""
    cases = [list(case[:3]) for case in (*CASES.values(), *OFFLINE_CASES.values())]
    return dict(zip([*CASES, *OFFLINE_CASES], server_pool.printed_by(SCRIPT, cases), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_who_answers(said, name):
    assert said[name].startswith(CASES[name][3])


def test_arguments_made_by_a_program(said):
    assert said["offline"] == SERVED
    assert said["offline, built-in"].startswith(OF_SGLANG)
