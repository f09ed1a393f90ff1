"""A start under DSPARK: the drafter is read once, and what the scheduler needs travels with SGLang's arguments."""

import os
import pickle
import shutil

import pytest
import torch
from family_targets import written_target
from random_drafter import random_drafter
from safetensors.torch import load_file, save_file
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang_objects import GOLDEN, server_args

from sglang_dspark.draft import weights
from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.engine import feature, flags, hooks, start
from sglang_dspark.engine.checks import VARIABLES
from sglang_dspark.engine.server import attached
from sglang_dspark.engine.start import started
from sglang_dspark.errors import CheckpointError, ConfigError, EngineError, UnservedError
from sglang_dspark.tools.launch import PLUGIN

DRAFT = GOLDEN / "vanilla_g7"


@pytest.fixture
def reads(monkeypatch):
    """The checkpoints whose configuration was read."""
    found, whole = [], weights.read
    monkeypatch.setattr(weights, "read", lambda path: (found.append(str(path)), whole(path))[1])
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
    return overrides.resolving_view(args), attached(args)


def test_the_drafter_is_read_once(reads):
    made, serving = settled()
    assert reads == [str(DRAFT)]
    drafter = serving.drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert made.speculative_num_draft_tokens == 8
    # Nothing of SGLang can read what it does not know: see tests/server/test_checkpoint_variants.py.
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
def test_a_gpu_admits_as_many_requests_as_graphs_are_captured_for(monkeypatch, changed, expected):
    """SGLang would admit thousands, for all of which start-up holds memory."""
    device, given, of_graphs, max_verify = (GPU | changed).values()
    args, declared = server_args(device=device, max_running_requests=given), {"max_running_requests": given}
    args.cuda_graph_config = CudaGraphConfig(decode=PhaseConfig(max_bs=of_graphs))
    monkeypatch.setattr(flags, "resolving_view", lambda args: args)
    monkeypatch.setattr(flags, "declare_resolution", lambda args, source, **fields: declared.update(fields))
    flags.limit_requests(args, max_verify + 1)
    assert (declared["max_running_requests"], args.max_running_requests) == (expected, given)


def test_the_limit_reaches_the_scheduler(reads, monkeypatch):
    def as_on_a_gpu(args, window):
        assert overrides.resolving_view(args).cuda_graph_config.decode.max_bs > 0
        overrides.declare_resolution(args, "dspark", max_running_requests=77)

    monkeypatch.setattr(start, "limit_requests", as_on_a_gpu)
    made, _ = settled()
    assert made.max_running_requests == 77
