"""Server arguments under DSPARK: the drafter is read once, and what the scheduler needs travels with the arguments."""

import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from random_drafter import random_drafter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft import resolved
from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.startup import hooks, resolution, server_args
from sglang_dspark.errors import CheckpointError, UnservedError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DRAFT = GOLDEN / "vanilla_g7"


@pytest.fixture
def reads(monkeypatch):
    """The checkpoints whose configuration was read."""
    found, whole = [], resolved.read
    monkeypatch.setattr(resolved, "read", lambda path: (found.append(str(path)), whole(path))[1])
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    monkeypatch.setattr(server_args, "_refusals", lambda args: iter(()))
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")  # or starting would leave it behind
    return found


def namespace(method=None, **changes):
    target = AutoConfig.from_pretrained(GOLDEN / "target")
    names = ("draft_model_revision", "draft_load_format", "draft_model_quantization", "num_draft_tokens")
    unset = dict.fromkeys((*(f"speculative_{name}" for name in names), "download_dir", "quantization"))
    unset |= dict.fromkeys(("prefill_attention_backend", "decode_attention_backend", "sampling_backend"))
    given = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(DRAFT), "device": "cpu"}
    given |= {"model_path": "target", "load_format": "auto", "attention_backend": None, "min_free_slots_delay": None}
    given |= {"kv_cache_dtype": "auto"}
    model = SimpleNamespace(hf_config=target, hf_text_config=target, quantization=method, dtype=torch.float32)
    return SimpleNamespace(**unset | given | {"get_model_config": lambda: model} | changes)


def start(cls, arguments):
    """What ``ServerArgs`` does with its arguments."""
    server_args.validate(arguments)
    server_args.complete(arguments)
    return arguments


def settled(**changes):
    """What start-up settles about a server with these arguments, as it reaches the scheduler."""
    made = resolution.from_cli_args(start, object, namespace(**changes))
    return made, pickle.loads(pickle.dumps(attached(made)))


def test_the_drafter_is_read_once(reads):
    made, serving = settled()
    assert reads == [str(DRAFT)]
    drafter = serving.drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert (made.speculative_num_draft_tokens, made.speculative_draft_model_path) == (8, str(DRAFT))


def test_no_drafter_is_read_without_one(reads):
    made, serving = settled(speculative_draft_model_path=None, speculative_dspark_draft_free="on")
    assert (reads, serving.drafter, made.speculative_draft_model_path) == ([], None, None)


def head_of_codes(folder, name="lm_head.weight"):
    """The golden target with an LM head that is not its embedding, of bytes."""
    shutil.copytree(GOLDEN / "target", folder, copy_function=shutil.copyfile)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(256, 128, dtype=torch.int8)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_head.qweight"])
def test_a_drafter_needs_a_head_of_its_own_where_the_targets_is_quantised(reads, tmp_path, name):
    target = head_of_codes(tmp_path / "target", name)
    model, drafter = namespace(method="gptq").get_model_config(), str(random_drafter(tmp_path, "gated"))
    model.hf_text_config.tie_word_embeddings = False
    served = {"model_path": target, "get_model_config": lambda: model}
    settled(**served)  # the golden drafter has one
    with pytest.raises(CheckpointError, match=r"no lm_head.weight of its own, and the target's lm_head is .*gptq"):
        settled(**served, speculative_draft_model_path=drafter)
    model.quantization = None
    settled(**served, speculative_draft_model_path=drafter)  # nobody looks


def test_the_targets_quantisation_is_not_the_drafters(reads):
    assert settled(quantization="fp8")[0].speculative_draft_model_quantization == "unquant"
    assert settled(speculative_draft_model_quantization="fp8")[0].speculative_draft_model_quantization == "fp8"


def test_options_of_one_server_are_not_those_of_the_next(reads):
    settled(speculative_dspark_schedule="off")
    with pytest.raises(CheckpointError):
        settled(speculative_draft_model_path=str(GOLDEN))
    with pytest.raises(UnservedError):
        settled(device="tpu")
    assert settled()[1].config.schedule == "auto"


def shapes(device="cuda", dtype=torch.bfloat16, head_dim=128, kv="auto", **options):
    """What is refused of a target and a server without a drafter."""
    target, config = SimpleNamespace(dtype=dtype, head_dim=head_dim), DSparkConfig(**options)
    return [*server_args.shape_refusals(device, target, kv, config, None, config.gamma(None))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kv_cache_has_the_dtype_of_the_target(device):
    assert shapes(device, kv="bfloat16") == shapes(device, torch.float32) == []
    for kv, dtype in (("bfloat16", torch.float16), ("bf16", torch.float32)):
        [refusal] = shapes(device, dtype, kv=kv)
        assert f"--kv-cache-dtype={kv} beside a target in {dtype}" in refusal


def test_a_block_that_no_attention_can_be_built_for_is_refused():
    block = {"draft_free": True, "block_size": 127}
    assert shapes(**block) == []
    for head_dim, dtype, most in ((128, torch.bfloat16, 127), (256, torch.float16, 63), (128, torch.float32, 63)):
        [refusal] = shapes(head_dim=head_dim, dtype=dtype, draft_free=True, block_size=256)
        assert "--speculative-dspark-block-size=256 asks attention for 257 rows" in refusal
        assert refusal.endswith(f"pass {most} or less")
        assert shapes(head_dim=head_dim, dtype=dtype, draft_free=True, block_size=most) == []
    assert shapes("cpu", draft_free=True, block_size=256) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "0"),
        ({"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1"}, "1"),
        ({"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}, None),
    ],
    ids=["nobody asks", "SGLang is told", "CUDA is told"],
)
def test_nobody_waits_for_core_dumps_that_nobody_writes(reads, monkeypatch, given, expected):
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settled()
    assert os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH") == expected
