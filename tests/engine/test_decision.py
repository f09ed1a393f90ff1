"""Whose worker decodes: decided once, with the reason, before anything is written to SGLang's arguments."""

from pathlib import Path

import pytest
from sglang.srt.arg_groups import serving_hook
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import decision, hooks
from sglang_dspark.engine.launch.decision import OtherStart, decide
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.engine.launch.resolution import given_texts
from sglang_dspark.engine.launch_state import TargetOnly
from sglang_dspark.errors import ConfigError, UnservedError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TARGET = ("--model-path", str(GOLDEN / "target"))
PAIR = (*TARGET, "--speculative-draft-model-path", str(GOLDEN / "vanilla_g7"), "--speculative-algorithm", "DSPARK")
LEFT_TO_SGLANG = ("--json-model-override-args", '{"architectures": ["BaichuanForCausalLM"]}')
SERVED_BY_NONE = ("--json-model-override-args", '{"architectures": ["Llama4ForCausalLM"]}')
OF_ANOTHER_PAIR = ("--json-model-override-args", '{"vocab_size": 300}')
ENGINE, VERIFY_LEN = "--speculative-dspark-engine", "--speculative-dspark-verify-len"
FALLBACK = ("--speculative-dspark-fallback", "target-only")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """A machine without a GPU, on which SGLang finds the CPU unasked."""
    load_plugins()
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    monkeypatch.setattr(serving_hook, "get_device", lambda: "cpu")


def decided(*flags):
    """Return the decision about a command line. Its arguments have to stay as they are."""
    args = prepare_server_args([*flags])
    written = arguments.snapshot(args)
    found = decide(args, given_texts(args))
    assert arguments.snapshot(args) == written
    return found


@pytest.mark.parametrize(
    "flags",
    [TARGET, (*PAIR, ENGINE, "builtin"), (*TARGET, "--speculative-algorithm", "NGRAM")],
    ids=["plain", "builtin", "another algorithm"],
)
def test_what_is_not_asked_of_us(flags):
    assert decided(*flags) is None


@pytest.mark.parametrize("flags", [(), (ENGINE, "plugin"), FALLBACK], ids=["auto", "plugin", "fallback"])
def test_our_worker_decodes(flags):
    found = decided(*PAIR, *flags, "--speculative-draft-window-size", "64")
    assert isinstance(found, Launch)
    assert (found.draft_path, found.draft_window.size) == (str(GOLDEN / "vanilla_g7"), 64)


@pytest.mark.parametrize(
    ("flags", "because", "refusal"),
    [
        (
            LEFT_TO_SGLANG,
            "serve BaichuanForCausalLM, an architecture that it does not know",
            "target architecture ['Baichuan",
        ),
        (("--device", "npu"), "serve DSPARK cannot run with --device=npu", "DSPARK cannot run with --device=npu"),
        ((ENGINE, "scheduled"), f"{ENGINE} asks for it", ""),
        ((ENGINE, "scheduled", *SERVED_BY_NONE), f"{ENGINE} asks for it", ""),
    ],
    ids=["target", "device", "asked", "asked of any target"],
)
def test_another_worker_decodes(flags, because, refusal):
    found = decided(*PAIR, *flags)
    assert isinstance(found, OtherStart)
    assert (found.server.engine, because in found.because) == ("scheduled", True)
    assert refusal in found.refusal and bool(refusal) == bool(found.refusal)


def test_options_that_may_fit_the_drafter_are_not_said_to_be_wrong():
    """Ours would refuse them beside a drafter of seven drafts; this one is left to the other worker."""
    found = decided(*PAIR, *LEFT_TO_SGLANG, *("--speculative-dspark-schedule", "static"), VERIFY_LEN, "10")
    assert VERIFY_LEN not in found.refusal


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
def test_the_target_decodes_alone(flags, reason):
    found = decided(*PAIR, *FALLBACK, *flags)
    assert isinstance(found, TargetOnly)
    assert reason in found.reason


def resolve(*flags):
    prepare_server_args([*flags]).resolve_once()


def test_a_flag_that_is_refused_is_no_reason_for_another_worker():
    """Nor is a device that SGLang finds unasked."""
    with pytest.raises(ConfigError, match="--page-size=2") as caught:
        resolve(*PAIR, "--page-size", "2")
    assert "own worker" not in str(caught.value)


@pytest.fixture
def without_another_worker(monkeypatch):
    monkeypatch.setattr(decision, "other_servers", list)


@pytest.mark.usefixtures("without_another_worker")
def test_a_worker_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match=f"{ENGINE}=scheduled asks for a worker that this installation .* pass auto"):
        decided(*PAIR, ENGINE, "scheduled")


@pytest.mark.usefixtures("without_another_worker")
def test_a_target_that_only_another_worker_serves_is_refused_without_it():
    assert isinstance(decided(*PAIR, *LEFT_TO_SGLANG, *FALLBACK), TargetOnly)
    with pytest.raises(UnservedError, match="BaichuanForCausalLM'] is not served with DSPARK") as caught:
        resolve(*PAIR, *LEFT_TO_SGLANG)
    assert "either" not in str(caught.value)


def test_a_target_that_cannot_be_read_is_left_to_sglangs_own_words():
    drafter = [*PAIR, "--device", "cpu"]
    drafter[drafter.index("--model-path") + 1] = "/nowhere"
    assert isinstance(decided(*drafter), Launch)


def test_sglang_looks_up_no_files_of_the_drafter(monkeypatch):
    """Where models come from elsewhere, it would fetch them."""
    looked = []
    real = arguments.handle_model_source_paths

    def look(args):
        looked.append(args.speculative_draft_model_path)
        real(args)

    monkeypatch.setattr(arguments, "handle_model_source_paths", look)
    decided(*PAIR)
    assert looked and set(looked) == {None}
