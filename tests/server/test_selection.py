"""The engine of a server is the plugin's, unless SGLang's own is asked for. No server is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from golden_server import DRAFT, TARGET

DATA = Path(__file__).parents[1] / "data"
BASE = ["--model-path", str(TARGET), "--device", "cpu", "--disable-cuda-graph"]
PAIR = [*BASE, "--speculative-draft-model-path", str(DRAFT)]
DSPARK = [*PAIR, "--speculative-algorithm", "DSPARK"]
BUILT_IN = [*DSPARK, "--speculative-dspark-engine", "builtin"]
BLOCK = ["--speculative-dspark-block-size", "3"]
OF_ANOTHER_CLASS = ["--json-model-override-args", '{"architectures": ["BaichuanForCausalLM"]}']
OTHER_TARGET = ["--json-model-override-args", '{"vocab_size": 300}']

SERVED = "plugin: 8 tokens, auto, cpu"
WHY = "DSpark speculative decoding only supports CUDA"
OF_SGLANG = f"ValueError: {WHY}"
REFUSED = "--model-path: target architecture ['BaichuanForCausalLM'] is not served with DSPARK; served are "
# Arguments made by a program, in place of flags.
OFFLINE = {
    "model_path": str(TARGET),
    "device": "cpu",
    "disable_cuda_graph": True,
    "attention_backend": "torch_native",
    "speculative_algorithm": "DSPARK",
    "speculative_draft_model_path": str(DRAFT),
}


class Case(NamedTuple):
    """A start, and the beginning of its outcome.

    Attributes:
        flags: flags, or arguments by name.
        outcome: the outcome begins like this.
        env: environment variables.
        release: the release that SGLang claims to be; None for its own.
    """

    flags: list[str] | dict[str, Any]
    outcome: str
    env: dict[str, str] | None = None
    release: str | None = None


CASES = {
    "plain": Case(BASE, "plain"),
    "DSPARK": Case(DSPARK, SERVED),
    "lower case": Case([*PAIR, "--speculative-algorithm", "dspark"], SERVED),
    "plugin by flag": Case([*DSPARK, "--speculative-dspark-engine", "plugin"], SERVED),
    "plugin by its name": Case([*PAIR, "--speculative-algorithm", "DSPARK_PLUGIN"], SERVED),
    "built-in by flag": Case(BUILT_IN, OF_SGLANG),
    "built-in by variable": Case(DSPARK, OF_SGLANG, {"SGLANG_DSPARK_ENGINE": "builtin"}),
    "built-in by a file": Case([*DSPARK, "--config", str(DATA / "built_in.yaml")], OF_SGLANG),
    "flag before variable": Case(
        [*DSPARK, "--speculative-dspark-engine", "plugin"], SERVED, {"SGLANG_DSPARK_ENGINE": "builtin"}
    ),
    "the first that serves": Case([*DSPARK, "--speculative-dspark-engine", "auto"], SERVED),
    "SGLang's by our schedule": Case([*DSPARK, "--speculative-dspark-engine", "scheduled"], OF_SGLANG),
    "neither": Case(
        [*DSPARK, "--speculative-dspark-engine", "ours"],
        "ConfigError: --speculative-dspark-engine='ours': must be one of auto, plugin, scheduled, builtin",
    ),
    "a target that SGLang's may serve": Case([*DSPARK, *OF_ANOTHER_CLASS], f"UnservedError: {REFUSED}"),
    "the same for the plugin alone": Case(
        [*DSPARK, *OF_ANOTHER_CLASS, "--speculative-dspark-engine", "plugin"], f"UnservedError: {REFUSED}"
    ),
    "the same by the plugin's name": Case(
        [*PAIR, *OF_ANOTHER_CLASS, "--speculative-algorithm", "DSPARK_PLUGIN"], f"UnservedError: {REFUSED}"
    ),
    "a target that neither serves": Case(
        [*DSPARK, "--json-model-override-args", '{"architectures": ["Llama4ForCausalLM"]}'],
        "UnservedError: --model-path: target architecture ['Llama4ForCausalLM'] is not served with DSPARK",
    ),
    "the target alone, for want of both": Case(
        [*DSPARK, *OF_ANOTHER_CLASS, "--speculative-dspark-fallback", "target-only"], f"target only: {REFUSED}"
    ),
    "both": Case(
        [*PAIR, "--speculative-algorithm", "DSPARK_PLUGIN", "--speculative-dspark-engine", "builtin"],
        "ConfigError: --speculative-algorithm DSPARK_PLUGIN is the plugin, and --speculative-dspark-engine=builtin",
    ),
    "an option of the plugin for the built-in": Case(
        [*BUILT_IN, "--speculative-dspark-schedule", "static"],
        "ConfigError: --speculative-dspark-schedule=static belongs to the plugin, and --speculative-dspark-engine",
    ),
    "an option of both": Case([*DSPARK, *BLOCK], "plugin: 4 tokens, auto, cpu"),
    "an option of both for the built-in": Case([*BUILT_IN, *BLOCK], OF_SGLANG),
    "a variable of the built-in": Case(DSPARK, SERVED, {"SGLANG_DSPARK_FAST_KERNEL": "0"}),
    "a quantised target": Case([*DSPARK, "--quantization", "fp8"], SERVED),
    "an unknown release": Case(
        DSPARK, "EngineError: sglang 0.5.99 is installed; sglang-dspark drives", release="0.5.99"
    ),
    "an unknown release on request": Case([*DSPARK, "--speculative-dspark-untested-sglang"], SERVED, release="0.5.99"),
    "an unknown release without DSPARK": Case(BASE, "plain", release="0.5.99"),
    "an unknown release with its own": Case(BUILT_IN, OF_SGLANG, release="0.5.99"),
    "target only": Case(
        [*DSPARK, *BLOCK, "--speculative-dspark-fallback", "target-only", *OTHER_TARGET],
        f"target only: {DRAFT / 'config.json'}: vocab_size=256, but the target has vocab_size=300",
    ),
    "offline": Case(OFFLINE, SERVED),
    "offline, built-in": Case(OFFLINE, OF_SGLANG, {"SGLANG_DSPARK_ENGINE": "builtin"}),
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
        found = outcome(ServerArgs(**flags) if isinstance(flags, dict) else prepare_server_args(flags))
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    for name in variables:
        del os.environ[name]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(server_pool):
    """Return the outcome of every case; one process tries all of them."""
    cases = [(case.flags, case.env or {}, case.release) for case in CASES.values()]
    return dict(zip(CASES, server_pool.printed_by(SCRIPT, cases), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_engine_of_a_server(outcomes, name):
    assert outcomes[name].startswith(CASES[name].outcome)


def test_auto_says_why_neither_serves(outcomes):
    """SGLang's own is tried where its DSPARK may serve the target, and nowhere else."""
    either = f"SGLang's own worker does not serve it either: {WHY}"
    tried = {name for name, found in outcomes.items() if either in found}
    assert tried == {"a target that SGLang's may serve", "the target alone, for want of both"}
