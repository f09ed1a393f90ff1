"""Tests of a start under DSPARK: what it reads, what travels with SGLang's arguments, and what it misses.

Every option arrives from a YAML file for SGLang's ``--config``, and SGLang has the fields that we touch.
"""

import ast
import inspect
import os
import pickle
import pkgutil
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from family_targets import written_target
from random_drafter import random_drafter
from safetensors.torch import load_file, save_file
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_objects import GOLDEN, model_config, partly, runner, server_args, table

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft import weights
from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.engine import decision, feature, flags, scheduler, sglang_types, start
from sglang_dspark.engine.checks import VARIABLES
from sglang_dspark.engine.scheduler import check_start
from sglang_dspark.engine.server import attached
from sglang_dspark.engine.start import started
from sglang_dspark.errors import CheckpointError, ConfigError, EngineError, UnservedError
from sglang_dspark.tools.launch import PLUGIN

DRAFT = GOLDEN / "vanilla_g7"


@pytest.fixture
def reads(monkeypatch, unhooked):
    """The checkpoints whose configuration was read."""
    found, whole = [], weights.read
    monkeypatch.setattr(weights, "read", lambda path: (found.append(str(path)), whole(path))[1])
    load_plugins()
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
    return overrides.resolving_view(args), attached(args)


def test_the_drafter_is_read_once(reads):
    made, serving = settled()
    assert reads == [str(DRAFT)]
    drafter = serving.drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert made.speculative_num_draft_tokens == 8
    # Nothing of SGLang can read what it does not know: see tests/server/test_targets.py.
    assert made.speculative_draft_model_path is None


def test_a_list_of_tokens_travels_with_the_drafter(reads, tmp_path):
    flag, path = "--speculative-dspark-draft-vocabulary", tmp_path / "list.json"
    save_token_ids(path, [3, 5, 8])
    _, serving = settled(flag, str(path))
    assert (serving.drafter.token_ids, serving.timed["proposed"]) == ([3, 5, 8], "3")
    save_token_ids(path, [3, 256])
    with pytest.raises(ConfigError, match=rf"{flag}={path}: .*within \[0, 255\].*; drop the flag"):
        resolve(flag, str(path))


def test_no_drafter_is_read_without_one(reads):
    _, serving = settled("--speculative-dspark-draft-free", draft=None)
    assert (reads, serving.drafter, serving.draft_path) == ([], None, "")


def head_of_codes(folder, name="lm_head.weight"):
    """The golden target with an LM head that is not its embedding, of bytes."""
    shutil.copytree(GOLDEN / "target", folder, copy_function=shutil.copyfile)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(256, 128, dtype=torch.int8)}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def quantised(monkeypatch):
    """Says by which method SGLang is to take the target for quantised; its LM head is not tied then."""
    read = feature.model_config_of

    def by(method):
        def model_config(args):
            target = read(args)
            target.quantization, target.hf_text_config.tie_word_embeddings = method, False
            return target

        monkeypatch.setattr(feature, "model_config_of", model_config)

    return by


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.qweight"])
def test_a_drafter_needs_a_head_of_its_own_where_the_targets_is_quantised(reads, quantised, tmp_path, name):
    target = ("--model-path", head_of_codes(tmp_path / "target", name))
    drafter = str(random_drafter(tmp_path, "gated"))
    quantised("gptq")
    settled(*target)  # the golden drafter has one
    with pytest.raises(UnservedError, match=r"no lm_head.weight of its own, and the target's lm_head is .*gptq"):
        settled(*target, draft=drafter)
    quantised(None)
    settled(*target, draft=drafter)  # not looked at


def test_options_of_one_server_are_not_those_of_the_next(reads):
    settled("--speculative-dspark-schedule", "off")
    with pytest.raises(CheckpointError):
        settled(draft=GOLDEN)
    with pytest.raises(ConfigError):
        settled("--enable-memory-saver")
    assert settled()[1].config.schedule == "auto"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, "0"), ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "1"), ("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", None)],
)
def test_nobody_waits_for_core_dumps_that_nobody_writes(reads, monkeypatch, variable, expected):
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    settled()
    assert os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH") == expected


@pytest.mark.parametrize("variable", [variable.name for variable in VARIABLES])
def test_variables_that_end_the_start(reads, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable}=1 in the environment"):
        settled()


def test_a_resolution_without_our_hook_ends_the_start():
    """It would go on with the defaults of all options."""
    with pytest.raises(EngineError, match=r"did not call .*ServerArgs\.resolve_once"):
        started(server_args())


def test_the_kernels_of_experts_may_be_chosen(reads):
    """The operator chooses, or SGLang for some targets and GPUs; the choice holds for drafters with experts also."""
    for given, expected in (("triton", "triton"), ("megamoe", "auto")):
        made, _ = settled("--moe-runner-backend", given)
        assert (made.moe_runner_backend, made.moe_a2a_backend) == (expected, "none")


def test_a_target_that_reads_images_is_started_as_without_dspark(reads, tmp_path):
    target = written_target("Qwen3VLForConditionalGeneration", tmp_path / "target")
    draft = random_drafter(tmp_path / "draft", "tiny")
    made, _ = settled("--model-path", str(target), "--tokenizer-path", str(GOLDEN / "target"), draft=draft)
    assert ModelConfig.from_server_args(made).is_image_understandable_model


GPU = {"device": "cuda", "given": None, "of_graphs": 256, "max_verify": 7}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 256),
        ({"of_graphs": 160}, 160),
        ({"of_graphs": 512}, 256),
        ({"of_graphs": 512, "max_verify": 15}, 128),
        ({"of_graphs": 512, "max_verify": 3}, 512),
        ({"of_graphs": 8}, flags.MIN_REQUESTS),
        ({"max_verify": 63}, flags.MIN_REQUESTS),
        ({"given": 1000}, 1000),
        ({"given": 1}, 1),
        ({"device": "cpu"}, None),
    ],
    ids=str,
)
def test_a_gpu_admits_as_many_requests_as_graphs_are_captured_for(changed, expected):
    """SGLang would admit thousands, for all of which start-up holds memory."""
    device, given, of_graphs, max_verify = (GPU | changed).values()
    args = server_args(device=device, max_running_requests=given)
    args.cuda_graph_config = CudaGraphConfig(decode=PhaseConfig(max_bs=of_graphs))
    flags.limit_requests(args, max_verify + 1)
    assert (overrides.resolving_view(args).max_running_requests, args.max_running_requests) == (expected, given)


def test_the_limit_reaches_the_scheduler(reads, monkeypatch):
    def as_on_a_gpu(args, window):
        assert overrides.resolving_view(args).cuda_graph_config.decode.max_bs > 0
        overrides.declare_resolution(args, "dspark", max_running_requests=77)

    monkeypatch.setattr(start, "limit_requests", as_on_a_gpu)
    made, _ = settled()
    assert made.max_running_requests == 77


WINDOW, CONTEXT = 8, 100


def started_with(*, slots=64, free=64, columns=CONTEXT + 2 * WINDOW + 1, captures=True):
    return runner(
        token_to_kv_pool=partly(MHATokenToKVPool, size=slots),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(free, torch.float32, "cpu", None, need_sort=False),
        req_to_token_pool=table(2, columns),
        model_config=model_config(context_len=CONTEXT),
        model=partly(Qwen3ForCausalLM, capture_aux_hidden_states=captures),
    )


@pytest.fixture
def resolved():
    """SGLang's settings with the tokens per step."""
    with get_context().override_server_args(speculative_num_draft_tokens=WINDOW):
        yield


@pytest.mark.usefixtures("resolved")
def test_a_start_as_it_should_be():
    check_start(started_with(), WINDOW, captures=True)
    check_start(started_with(captures=False), WINDOW, captures=False)


def test_a_reservation_by_raw_arguments_ends_the_start():
    reserved = get_context().override_server_args(speculative_num_draft_tokens=1)
    with (
        reserved,
        pytest.raises(EngineError, match=r"reserves for 1 tokens .* verifies up to 8"),
    ):
        check_start(started_with(), WINDOW, captures=True)


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"slots": 128}, "pool has 128 slots and their allocator 64"),
        ({"columns": CONTEXT + WINDOW}, "have 108 columns, and a request may need 117"),
        ({"captures": False}, "does not return the hidden states"),
    ],
)
def test_what_was_not_done_is_named(fields, says):
    with pytest.raises(EngineError, match=says):
        check_start(started_with(**fields), WINDOW, captures=True)


@pytest.mark.usefixtures("resolved")
def test_a_release_whose_requests_end_elsewhere(monkeypatch):
    """A request gets another such method for a step: where SGLang calls something else, that would do nothing."""

    class Req:
        def update_finish_state(self, tokens):
            """With other arguments."""

    monkeypatch.setattr(scheduler, "Request", Req)
    with pytest.raises(EngineError, match="update_finish_state, which looks for the end of a text"):
        check_start(started_with(), WINDOW, captures=True)


TARGET = Path(__file__).parents[1] / "data" / "golden" / "target"

WRITTEN = {
    "schedule": {"off": "off", "'off'": "off", "early-stop": "early-stop"},
    "block_size": {"5": 5},
    "verify_len": {"0": 0, "3": 3},
    "confidence_threshold": {"0.5": 0.5, ".5": 0.5, "1": 1.0},
    "confidence_sts_path": {"of/mine.json": "of/mine.json"},
    "online_calibration": {"off": False, "on": True, "no": False, "True": True, "'off'": False},
    "sps_table_path": {"my table.json": "my table.json"},
    "draft_vocabulary": {"of/mine.json": "of/mine.json"},
    "draft_quantization": {"int8": "int8"},
    "draft_free": {"true": True, "on": True, "false": False, "'on'": True},
    "answer_cache": {"64": 64},
    "tpot_ms": {"30": 30.0},
    "min_tpot_ms": {"30": 30.0, "inf": float("inf")},
    "max_gap_ms": {"50": 50.0},
    "prompt_rows": {"64": 64},
    "unproven": {"survivals": ("survivals",), "[held-rows, prompt-rows]": ("held-rows", "prompt-rows")},
    "self_check": {"on": True, "off": False},
    "answer_cache_key": {"prompt": "prompt"},
    "engine": {"plugin": "plugin"},
    "untested_sglang": {"yes": True, "off": False},
    "fallback": {"target-only": "target-only"},
    "simulate_acceptance": {"0.8": (0.8,), "0.8,0.5": (0.8, 0.5), "[0.8, 0.5]": (0.8, 0.5), "[1, 0]": (1.0, 0.0)},
}
"""By option: what a file has, and the option's value."""
WITH = {
    "verify_len": {"schedule": "static"},
    "confidence_threshold": {"schedule": "threshold"},
    "answer_cache_key": {"answer_cache": "64"},
}
"""By option: what else it needs."""


def read(folder, name, text):
    """Return the options of a server whose file has this text for this option."""
    lines = [f"{flag_name(other)[2:]}: {value}" for other, value in {**WITH.get(name, {}), name: text}.items()]
    (folder / "server.yaml").write_text("\n".join(lines))
    load_plugins()
    args = prepare_server_args(["--model-path", str(TARGET), "--config", str(folder / "server.yaml")])
    return DSparkConfig.resolve(decision.given_texts(args), env={})


def test_every_option_is_here():
    assert list(WRITTEN) == [option.name for option in fields(DSparkConfig)]


@pytest.mark.parametrize(
    ("name", "text", "value"), [(name, *case) for name, cases in WRITTEN.items() for case in cases.items()]
)
def test_an_option_in_a_file(tmp_path, name, text, value):
    assert getattr(read(tmp_path, name, text), name) == value


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("schedule", "on", "schedule='true': must be one of auto"),
        ("online_calibration", "1", "online-calibration='1': must be on or off"),
        ("answer_cache", "off", "answer-cache='false': must be an integer"),
        ("max_gap_ms", "0.5", "max-gap-ms='0.5': must lie in 1 to 60000"),
        ("max_gap_ms", ".nan", "max-gap-ms='nan': must lie in"),
        ("simulate_acceptance", "[0.5, 2]", "simulate-acceptance='0.5,2': must all lie in"),
        ("simulate_acceptance", "[0.5, often]", "simulate-acceptance='0.5,often': must all lie in"),
    ],
)
def test_a_wrong_value_in_a_file(tmp_path, name, text, named):
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, name, text)


PROTOCOLS = [
    found
    for found in vars(sglang_types).values()
    if getattr(found, "_is_protocol", False) and found.__module__ == sglang_types.__name__
]
NOT_THERE = {
    "mrope_deltas",  # ours
    "get_internal_state_communicator",  # of a list of channels, by name
}


def attributes_in(source):
    """Return the attributes that a module uses: most are set as it goes."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_sglang_has_what_we_touch(protocol):
    [path] = re.findall(r"^``(sglang\.[\w.]+)``", protocol.__doc__)
    there = pkgutil.resolve_name(path)
    known = {*dir(there), *(name for base in there.__mro__ for name in vars(base).get("__annotations__", ()))}
    known |= {field.name for field in record_fields(there)} if there is ServerArgs else set()
    known |= attributes_in(Path(inspect.getsourcefile(there)).read_text())
    touched = {*protocol.__annotations__, *(name for name, of in vars(protocol).items() if inspect.isfunction(of))}
    assert {name for name in touched - known if not name.startswith("__")} <= NOT_THERE
