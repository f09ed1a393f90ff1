"""Server arguments under DSPARK: the drafter is read once, and what the scheduler needs travels with the arguments."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from sglang_dspark.draft import resolved
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.startup import hooks, resolution, server_args
from sglang_dspark.engine.startup.names import ALGORITHM
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
    # Arguments that resolve themselves when they are made, on every release.
    monkeypatch.setattr(arguments, "RESOLVED_LATER", False)
    return found


def namespace(**changes):
    target = AutoConfig.from_pretrained(GOLDEN / "target")
    names = ("draft_model_revision", "draft_load_format", "num_draft_tokens")
    unset = dict.fromkeys((*(f"speculative_{name}" for name in names), "download_dir", "quantization"))
    unset |= dict.fromkeys(("prefill_attention_backend", "decode_attention_backend", "sampling_backend"))
    given = {"speculative_algorithm": ALGORITHM, "speculative_draft_model_path": str(DRAFT), "device": "cpu"}
    given |= {"model_path": "target", "load_format": "auto", "attention_backend": None, "min_free_slots_delay": None}
    model = SimpleNamespace(hf_config=target, hf_text_config=target, quantization=None)
    return SimpleNamespace(**unset | given | {"get_model_config": lambda: model} | changes)


def start(cls, arguments):
    """What ``ServerArgs`` does with its arguments."""
    server_args.validate(arguments)
    server_args.complete(arguments)
    return arguments


def test_the_drafter_is_read_once_from_the_command_line(reads):
    made = resolution.from_cli_args(start, object, namespace())
    assert reads == [str(DRAFT)]
    settled = arguments.attached(made)
    drafter = pickle.loads(pickle.dumps(settled)).drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert drafter == settled.drafter
    assert made.speculative_num_draft_tokens == 8


def test_the_drafter_is_read_once_for_a_program(reads):
    made = start(object, namespace())
    assert reads == [arguments.attached(made).drafter.path] == [str(DRAFT)]


def test_no_drafter_is_read_without_one(reads):
    flags = {"speculative_draft_model_path": None, "speculative_dspark_draft_free": "on"}
    made = resolution.from_cli_args(start, object, namespace(**flags))
    assert (reads, arguments.attached(made).drafter, made.speculative_draft_model_path) == ([], None, None)


def test_options_of_one_server_are_not_those_of_the_next(reads):
    resolution.from_cli_args(start, object, namespace(speculative_dspark_schedule="off"))
    with pytest.raises(CheckpointError):
        resolution.from_cli_args(start, object, namespace(speculative_draft_model_path=str(GOLDEN)))
    with pytest.raises(UnservedError):
        resolution.from_cli_args(start, object, namespace(device="tpu"))
    assert arguments.attached(start(object, namespace())).config.schedule == "auto"
