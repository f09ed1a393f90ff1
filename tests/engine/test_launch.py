"""A start under DSPARK: the drafter is read once, and what the scheduler needs travels with SGLang's arguments."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from family_targets import written_target
from random_drafter import random_drafter
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.draft import resolved
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import defaults, hooks, model_checks
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.errors import CheckpointError, ConfigError, EngineError, UnservedError
from sglang_dspark.tools.launch import PLUGIN

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DRAFT = GOLDEN / "vanilla_g7"


@pytest.fixture
def reads(monkeypatch):
    """The checkpoints whose configuration was read."""
    found, whole = [], resolved.read
    monkeypatch.setattr(resolved, "read", lambda path: (found.append(str(path)), whole(path))[1])
    load_plugins()
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION"):
        monkeypatch.setenv(name, "0")  # or starting would leave it behind
    return found


def resolve(*flags, draft=DRAFT):
    """SGLang's arguments of a command line, resolved."""
    pair = () if draft is None else ("--speculative-draft-model-path", str(draft))
    args = prepare_server_args(["--model-path", str(GOLDEN / "target"), "--device", "cpu", *PLUGIN, *pair, *flags])
    args.resolve_once()
    return args


def settled(*flags, draft=DRAFT):
    """Return the launch state of a server with these arguments, as it reaches the scheduler."""
    args = pickle.loads(pickle.dumps(resolve(*flags, draft=draft)))
    return overrides.resolving_view(args), arguments.attached(args)


def test_the_drafter_is_read_once(reads):
    made, serving = settled()
    assert reads == [str(DRAFT)]
    drafter = serving.drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert made.speculative_num_draft_tokens == 8
    # Nothing of SGLang can read what it does not know: see tests/server/test_checkpoint_variants.py.
    assert made.speculative_draft_model_path is None


def test_no_drafter_is_read_without_one(reads):
    _, serving = settled("--speculative-dspark-draft-free", draft=None)
    assert (reads, serving.drafter, serving.draft_path) == ([], None, "")


def test_options_of_one_server_are_not_those_of_the_next(reads):
    settled("--speculative-dspark-schedule", "off")
    with pytest.raises(CheckpointError):
        settled(draft=GOLDEN)
    with pytest.raises(ConfigError):
        settled("--page-size", "2")
    assert settled()[1].config.schedule == "auto"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "0"),
        ({"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1"}, "1"),
        ({"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}, None),
    ],
    ids=["not asked", "SGLang is told", "CUDA is told"],
)
def test_nobody_waits_for_core_dumps_that_nobody_writes(reads, monkeypatch, given, expected):
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settled()
    assert os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH") == expected


@pytest.mark.parametrize("variable", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_variables_that_end_the_start(reads, monkeypatch, variable):
    """The one has requests go round our checks, the other resizes the K/V pool after the drafter's was made."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable}=1 in the environment"):
        settled()


def test_a_resolution_without_our_hook_ends_the_start():
    """It would go on with the defaults of all options."""
    with pytest.raises(EngineError, match=r"did not call .*ServerArgs\.resolve_once"):
        Launch.of(SimpleNamespace())


def test_the_kernels_of_experts_may_be_chosen(reads):
    """The operator chooses, or SGLang for some targets and GPUs; the choice holds for drafters with experts also."""
    made, _ = settled("--moe-runner-backend", "triton")
    assert made.moe_runner_backend == "triton"
    with pytest.raises(ConfigError, match="--speculative-moe-runner-backend=triton; drop the flag"):
        settled("--speculative-moe-runner-backend", "triton")
    with pytest.raises(ConfigError, match="--moe-runner-backend=flashinfer_megamoe, which") as caught:
        settled("--moe-runner-backend", "flashinfer_megamoe")
    assert "--speculative-moe-runner-backend" not in str(caught.value)  # which SGLang would choose


def test_machines_do_not_fall_back_each_by_itself(reads):
    two = ("--nnodes", "2", "--node-rank", "1", "--tp-size", "2", "--dist-init-addr", "127.0.0.1:20000")
    with pytest.raises(
        ConfigError, match="--speculative-dspark-fallback=target-only cannot be combined with --nnodes=2"
    ):
        resolve(*two, "--speculative-dspark-fallback", "target-only")
    assert resolve(*two).node_rank == 1


def test_all_refusals_are_said_at_once(reads, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        resolve("--page-size", "2", "--speculative-num-draft-tokens", "4", "--enable-mixed-chunk")
    assert not isinstance(caught.value, UnservedError)
    named = ("--page-size=2", "--speculative-num-draft-tokens=4", "--enable-mixed-chunk=True")
    assert [flag for flag in named if f"{flag}" not in str(caught.value)] == []
    monkeypatch.setattr(model_checks, "DEVICES", ("cuda",))
    with pytest.raises(UnservedError, match="--device=cpu; pass"):
        resolve("--page-size", "2")


def test_a_target_that_reads_images_is_started_as_without_dspark(reads, tmp_path):
    target = written_target("Qwen3VLForConditionalGeneration", tmp_path / "target")
    draft = random_drafter(tmp_path / "draft", "tiny")
    made, _ = settled("--model-path", str(target), "--tokenizer-path", str(GOLDEN / "target"), draft=draft)
    assert ModelConfig.from_server_args(made).is_image_understandable_model


def limit_of(monkeypatch, device, given, max_verify):
    """Requests at a time, with what an operator has given."""
    declared = {"max_running_requests": given}
    monkeypatch.setattr(defaults, "declare_resolution", lambda args, source, **fields: declared.update(fields))
    args = SimpleNamespace(device=device, max_running_requests=given)
    defaults.limit_requests(args, max_verify + 1)
    assert args.max_running_requests == given
    return declared["max_running_requests"]


@pytest.mark.parametrize(
    ("device", "given", "of_graphs", "max_verify", "expected"),
    [
        ("cuda", None, 256, 7, 256),
        ("cuda", None, 160, 7, 160),
        ("cuda", None, 512, 7, 256),
        ("cuda", None, 512, 15, 128),
        ("cuda", None, 512, 3, 512),
        ("cuda", None, 8, 7, defaults.MIN_REQUESTS),
        ("cuda", None, 256, 63, defaults.MIN_REQUESTS),
        ("cuda", 1000, 256, 7, 1000),
        ("cuda", 1, 256, 7, 1),
        ("cpu", None, 256, 7, None),
    ],
)
def test_a_gpu_admits_as_many_requests_as_graphs_are_captured_for(
    monkeypatch, device, given, of_graphs, max_verify, expected
):
    """SGLang would admit thousands, for all of which start-up holds memory."""
    graphs = SimpleNamespace(decode=SimpleNamespace(max_bs=of_graphs))
    monkeypatch.setattr(defaults, "resolving_view", lambda args: SimpleNamespace(cuda_graph_config=graphs))
    assert limit_of(monkeypatch, device, given, max_verify) == expected


def test_the_limit_reaches_the_scheduler(reads, monkeypatch):
    def as_on_a_gpu(args, window):
        assert overrides.resolving_view(args).cuda_graph_config.decode.max_bs > 0
        overrides.declare_resolution(args, "dspark", max_running_requests=77)

    monkeypatch.setattr(defaults, "limit_requests", as_on_a_gpu)
    made, _ = settled()
    assert made.max_running_requests == 77


@pytest.mark.parametrize(("flag", "value"), [("--moe-a2a-backend", "deepep"), ("--moe-dense-tp-size", "1")])
def test_ranks_hold_the_hidden_states_of_all_tokens(reads, flag, value):
    with pytest.raises(ConfigError, match=f"{flag}={value}; drop the flag: each rank would hold"):
        resolve("--tp-size", "2", flag, value)
