"""Server arguments under DSPARK: the drafter is read once, and what the scheduler needs travels with the arguments."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.draft import resolved
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.startup import hooks, server_args
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
    return found


def resolve(*flags, draft=DRAFT):
    """SGLang's arguments of a command line, resolved."""
    pair = () if draft is None else ("--speculative-draft-model-path", str(draft))
    args = prepare_server_args(["--model-path", str(GOLDEN / "target"), "--device", "cpu", *PLUGIN, *pair, *flags])
    getattr(args, "resolve_once", lambda: None)()  # once they were resolved when they were made
    return args


def settled(*flags, draft=DRAFT):
    """What start-up settles about a server with these arguments, as it reaches the scheduler."""
    args = pickle.loads(pickle.dumps(resolve(*flags, draft=draft)))
    return arguments.resolved(args), arguments.attached(args)


def test_the_drafter_is_read_once(reads):
    made, serving = settled()
    assert reads == [str(DRAFT)]
    drafter = serving.drafter
    assert (drafter.path, drafter.config.block_size, drafter.token_ids) == (str(DRAFT), 7, None)
    assert (made.speculative_num_draft_tokens, made.speculative_draft_model_path) == (8, str(DRAFT))


def test_no_drafter_is_read_without_one(reads):
    made, serving = settled("--speculative-dspark-draft-free", draft=None)
    assert (reads, serving.drafter, made.speculative_draft_model_path) == ([], None, None)


def test_options_of_one_server_are_not_those_of_the_next(reads):
    settled("--speculative-dspark-schedule", "off")
    with pytest.raises(CheckpointError):
        settled(draft=GOLDEN)
    with pytest.raises(UnservedError):
        settled("--quantization", "fp8")
    assert settled()[1].config.schedule == "auto"


@pytest.mark.parametrize("variable", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_variables_that_some_releases_read(reads, monkeypatch, variable):
    """The one has requests go round our checks, the other resizes the K/V pool after the drafter's was made."""
    monkeypatch.setenv(variable, "1")
    known = hasattr(envs, variable)
    with pytest.raises(ConfigError, match=f"{variable}=1 in the environment") if known else nullcontext():
        settled()


def test_a_resolution_without_our_hook_ends_the_start(monkeypatch):
    """It would go on with the defaults of all options."""
    monkeypatch.setattr(arguments, "RESOLVED_LATER", True)
    with pytest.raises(EngineError, match=r"did not call .*ServerArgs\.resolve_once"):
        server_args.validate(SimpleNamespace())
