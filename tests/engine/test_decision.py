"""Whose worker decodes: decided once, with the reason, before anything is written to SGLang's arguments."""

import pickle

import pytest
from faked_gpu import machine
from sglang.srt.arg_groups import serving_hook
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_objects import GOLDEN

from sglang_dspark.engine import decision, support
from sglang_dspark.engine import server as module
from sglang_dspark.engine.decision import decide, given_texts
from sglang_dspark.engine.server import DSparkServer, TargetOnly, attached, snapshot
from sglang_dspark.engine.start import LeftToSGLang
from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.features.builtin_worker import ScheduledServer

TARGET = ("--model-path", str(GOLDEN / "target"))
DRAFTER = (*TARGET, "--speculative-draft-model-path", str(GOLDEN / "vanilla_g7"))
PAIR = (*DRAFTER, "--speculative-algorithm", "DSPARK")
BY_NAME = (*DRAFTER, "--speculative-algorithm", "DSPARK_PLUGIN")
LEFT_TO_SGLANG = ("--json-model-override-args", '{"architectures": ["BaichuanForCausalLM"]}')
SERVED_BY_NONE = ("--json-model-override-args", '{"architectures": ["Llama4ForCausalLM"]}')
OF_ANOTHER_PAIR = ("--json-model-override-args", '{"vocab_size": 300}')
ENGINE = "--speculative-dspark-engine"
BUILT_IN = (*PAIR, ENGINE, "builtin")
FALLBACK = ("--speculative-dspark-fallback", "target-only")
OURS = ("--speculative-dspark-schedule", "static")
BLOCK = ("--speculative-dspark-block-size", "3")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch, unhooked):
    """A machine without a GPU, on which SGLang finds the CPU unasked."""
    load_plugins()
    monkeypatch.setattr(serving_hook, "get_device", lambda: "cpu")


def decided(*flags):
    """Return the decision about a command line. Its arguments have to stay as they are."""
    args = prepare_server_args([*flags])
    written = snapshot(args)
    found = decide(args, given_texts(args))
    assert snapshot(args) == written
    return found


@pytest.mark.parametrize("flags", [(), (ENGINE, "plugin"), FALLBACK], ids=["auto", "plugin", "fallback"])
def test_our_worker_decodes(flags):
    found = decided(*PAIR, *flags, "--speculative-draft-window-size", "64")
    assert isinstance(found, DSparkServer)
    assert (found.draft_path, found.draft_window.size) == (str(GOLDEN / "vanilla_g7"), 64)


@pytest.mark.parametrize(
    ("flags", "why", "refusal"),
    [
        (LEFT_TO_SGLANG, "BaichuanForCausalLM", "target architecture ['Baichuan"),
        (("--device", "npu"), "DSPARK cannot run with --device=npu", "DSPARK cannot run with --device=npu"),
        ((*LEFT_TO_SGLANG, *BLOCK, *FALLBACK, "--speculative-dspark-untested-sglang"), "Baichuan", "target"),
    ],
    ids=["target", "device", "options of both"],
)
def test_what_ours_does_not_serve_is_left_to_sglangs_worker(flags, why, refusal):
    found = decided(*PAIR, *flags)
    assert isinstance(found, LeftToSGLang)
    assert why in found.why and refusal in found.refusal and found.falls_back == (FALLBACK[1] in flags)
    assert f"unmodified: {found.why}." in found.reason
    assert f"{ENGINE} scheduled" in found.reason


@pytest.mark.parametrize("name", ["flag", "variable", "variable of a flag that SGLang has"])
def test_options_that_sglangs_worker_would_not_follow_are_refused(name, monkeypatch):
    given, variable = OURS if name == "flag" else (), {"variable": "SCHEDULE", "flag": None}.get(name, "BLOCK_SIZE")
    if variable is not None:
        monkeypatch.setenv(f"SGLANG_DSPARK_{variable}", "static" if variable == "SCHEDULE" else "3")
    with pytest.raises(ConfigError, match=f"belongs to the plugin's worker, .*Baichuan.* or pass {ENGINE} scheduled"):
        decided(*PAIR, *LEFT_TO_SGLANG, *given)


@pytest.mark.parametrize("flags", [(), SERVED_BY_NONE, OURS], ids=["a target of ours", "any target", "our policies"])
def test_our_schedule_on_sglangs_worker_has_to_be_named(flags):
    found = decided(*PAIR, *flags, ENGINE, "scheduled")
    assert isinstance(found, ScheduledServer)
    assert f"as {ENGINE} asks" in found.reason


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (SERVED_BY_NONE, "target architecture ['Llama4ForCausalLM'] is not served"),
        (OF_ANOTHER_PAIR, "vocab_size=256, but the target has vocab_size=300"),
        (("--speculative-draft-model-path", str(GOLDEN)), "config.json"),
        ((ENGINE, "plugin", *LEFT_TO_SGLANG), "target architecture ['BaichuanForCausalLM'] is not served"),
    ],
    ids=["target", "pair", "drafter", "no other worker shall"],
)
def test_the_target_decodes_without_drafts(flags, reason):
    found = decided(*PAIR, *FALLBACK, *flags)
    assert isinstance(found, TargetOnly)
    assert reason in found.reason


def resolve(*flags):
    prepare_server_args([*flags]).resolve_once()


WHY = "DSpark speculative decoding only supports CUDA"
SERVED, OF_SGLANG = "plugin: 8 tokens, auto, cpu", f"ValueError: {WHY}"
REFUSED = "--model-path: target architecture ['BaichuanForCausalLM'] is not served with DSPARK: this plugin does "
SERVED_BY = f"UnservedError: {REFUSED}"
OTHER_RELEASE = "EngineError: sglang 0.5.99 is installed, and sglang-dspark"
# Arguments made by a program, in place of flags.
OFFLINE = {
    "model_path": TARGET[1], "device": "cpu", "disable_cuda_graph": True, "attention_backend": "torch_native",
    "speculative_algorithm": "DSPARK", "speculative_draft_model_path": DRAFTER[-1],
}  # fmt: skip
BY_VARIABLE = {"SGLANG_DSPARK_ENGINE": "builtin"}
# Flags, or arguments by name, what the outcome begins with, and variables.
OUTCOMES = {
    "plain": (TARGET, "plain", {}),
    "lower case": ((*DRAFTER, "--speculative-algorithm", "dspark"), SERVED, {}),
    "plugin by its name": (BY_NAME, SERVED, {}),
    "built-in by flag": (BUILT_IN, OF_SGLANG, {}),
    "built-in by variable": (PAIR, OF_SGLANG, BY_VARIABLE),
    "built-in by a file": ((*PAIR, "--config", str(GOLDEN.parent / "built_in.yaml")), OF_SGLANG, {}),
    "flag before variable": ((*PAIR, ENGINE, "plugin"), SERVED, BY_VARIABLE),
    "the first that serves": ((*PAIR, ENGINE, "auto"), SERVED, {}),
    "SGLang's by our schedule": ((*PAIR, ENGINE, "scheduled"), OF_SGLANG, {}),
    "neither": ((*PAIR, ENGINE, "ours"), f"ConfigError: {ENGINE}='ours': must be one of auto, plugin, scheduled", {}),
    "a target that SGLang's may serve": ((*PAIR, *LEFT_TO_SGLANG), SERVED_BY, {}),
    "the same for the plugin alone": ((*PAIR, *LEFT_TO_SGLANG, ENGINE, "plugin"), SERVED_BY, {}),
    "the same by the plugin's name": ((*BY_NAME, *LEFT_TO_SGLANG), SERVED_BY, {}),
    "the target alone, for want of both": ((*PAIR, *LEFT_TO_SGLANG, *FALLBACK), f"target only: {REFUSED}", {}),
    "both": (
        (*BY_NAME, ENGINE, "builtin"),
        "ConfigError: --speculative-algorithm DSPARK_PLUGIN is the plugin, and ",
        {},
    ),
    "an option of the plugin for the built-in": (
        (*BUILT_IN, *OURS),
        f"ConfigError: {OURS[0]}=static belongs to the",
        {},
    ),
    "an option of both": ((*PAIR, *BLOCK), "plugin: 4 tokens, auto, cpu", {}),
    "an option of both for the built-in": ((*BUILT_IN, *BLOCK), OF_SGLANG, {}),
    "a variable of the built-in": (PAIR, SERVED, {"SGLANG_DSPARK_FAST_KERNEL": "0"}),
    "a quantised target": ((*PAIR, "--quantization", "fp8"), SERVED, {}),
    "0.5.99": (PAIR, OTHER_RELEASE, {}),
    "0.5.99 on request": ((*PAIR, "--speculative-dspark-untested-sglang"), SERVED, {}),
    "0.5.99 without DSPARK": (TARGET, "plain", {}),
    "0.5.99 with its own": (BUILT_IN, OF_SGLANG, {}),
    "target only": ((*PAIR, *BLOCK, *FALLBACK, *OF_ANOTHER_PAIR), "target only: ", {}),
    "offline": (OFFLINE, SERVED, {}),
    "offline, built-in": (OFFLINE, OF_SGLANG, BY_VARIABLE),
}


def outcome(flags):
    """Return what a start with these flags, or arguments by name, ends with, as its scheduler finds it."""
    try:
        given = ("--device", "cpu", "--disable-cuda-graph")
        args = ServerArgs(**flags) if isinstance(flags, dict) else prepare_server_args([*flags, *given])
        args.resolve_once()
    except (DSparkError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    args = pickle.loads(pickle.dumps(args))
    view, found = resolving_view(args), attached(args)
    if found is None:
        return view.speculative_algorithm or "plain"
    if isinstance(found, TargetOnly):
        given = [field.name for field in record_fields(ServerArgs) if field.name.startswith("speculative_")]
        assert all(getattr(args, name) != 3 for name in given), "what was asked of the drafter stayed"
        return f"target only: {found.reason}"
    return f"plugin: {view.speculative_num_draft_tokens} tokens, {found.config.schedule}, {view.device}"


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome_of_a_start(name, monkeypatch):
    flags, begins, variables = OUTCOMES[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    if name.startswith("0.5.99"):
        monkeypatch.setattr(support, "installed_sglang", lambda: "0.5.99")
    found = outcome(flags)
    assert found.startswith(begins)
    # SGLang's own is tried where its DSPARK may serve the target, and nowhere else.
    tried = f"SGLang's own worker does not serve it either: {WHY}" in found
    assert tried == (name in ("a target that SGLang's may serve", "the target alone, for want of both"))


def test_a_flag_that_is_refused_is_no_reason_for_another_worker():
    """Nor is a device that SGLang finds unasked."""
    with pytest.raises(ConfigError, match="--enable-memory-saver") as caught:
        resolve(*PAIR, "--enable-memory-saver")
    assert "own worker" not in str(caught.value)


def test_a_worker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(decision, "all_features", tuple)
    with pytest.raises(ConfigError, match=f"{ENGINE}=scheduled asks for a worker that this installation .* pass auto"):
        decided(*PAIR, ENGINE, "scheduled")


def test_a_target_that_cannot_be_read_is_left_to_sglangs_own_words():
    assert isinstance(decided(*PAIR, "--device", "cpu", "--model-path", "/nowhere"), DSparkServer)


def test_sglang_looks_up_no_files_of_the_drafter(monkeypatch):
    """It would fetch models that come from elsewhere."""
    looked, real = [], module.handle_model_source_paths

    def look(args):
        looked.append(args.speculative_draft_model_path)
        real(args)

    monkeypatch.setattr(module, "handle_model_source_paths", look)
    decided(*PAIR)
    assert looked and set(looked) == {None}


def decisions(args):
    """Return what SGLang has decided, by field."""
    view = resolving_view(args)
    return {field.name: getattr(view, field.name) for field in record_fields(ServerArgs)}


def test_sglangs_worker_is_left_untouched_on_a_gpu(monkeypatch):
    """The arguments are those of a start with ``builtin``, and nothing of ours travels with them; `doctor` says so."""
    monkeypatch.setattr(serving_hook, "get_device", lambda: "cuda")
    command, found = [*PAIR, *LEFT_TO_SGLANG, "--random-seed", "1"], []
    with machine("Hopper"):
        for engine in ("auto", "builtin"):
            args = prepare_server_args([*command, ENGINE, engine])
            args.resolve_once()
            found.append(decisions(args))
            assert attached(args) is None
        said = decision.resolve(command)
    assert found[0] == found[1] and found[0]["speculative_algorithm"] == "DSPARK"
    assert "unmodified: the plugin's worker does not serve BaichuanForCausalLM" in said


FIELDS = {
    "model_path": TARGET[1], "device": "cuda", "random_seed": 1,
    "speculative_algorithm": "DSPARK", "speculative_draft_model_path": DRAFTER[-1],
}  # fmt: skip


@pytest.fixture
def on_a_gpu():
    with machine("Hopper"):
        yield


def resolved_before_plugins(**fields):
    """Return arguments that a framework has made in a process without plugins."""
    args = ServerArgs(**FIELDS | fields)
    ServerArgs.resolve_once.__wrapped__(args)
    return args


def test_arguments_that_were_resolved_before_the_plugin_was_there_are_resolved_again(on_a_gpu):
    args, expected = resolved_before_plugins(), ServerArgs(**FIELDS)
    assert decisions(args)["speculative_algorithm"] == "DSPARK"
    expected.resolve_once()
    args.check_server_args()
    there = pickle.loads(pickle.dumps(args))
    assert isinstance(attached(there), DSparkServer)
    assert decisions(there) == decisions(expected)
    assert decisions(there)["speculative_algorithm"] == "DSPARK_PLUGIN"


@pytest.mark.parametrize(
    ("fields", "variables"), [({}, BY_VARIABLE), ({"speculative_algorithm": None}, {})], ids=["builtin", "plain"]
)
def test_arguments_that_ask_for_others_stay_as_they_were_resolved(on_a_gpu, monkeypatch, fields, variables):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    args = resolved_before_plugins(**fields)
    before = decisions(args)
    args.check_server_args()
    assert decisions(args) == before and attached(args) is None
