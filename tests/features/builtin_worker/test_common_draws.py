"""SGLang's own worker, as it comes, keeps the drafts that ours keeps. On servers: test_simulated_acceptance.py."""

from array import array
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from dspark_kernels import simulated_accept

from sglang_dspark.engine import hooks
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.builtin_worker import step

RATES, VARIABLE = "0.9,0.6,0.8", "SGLANG_DSPARK_SIMULATE_ACCEPTANCE"
PROMPTS = [[5, 6, 7], [70000, 1], [5, 6]]


def worker(**found):
    """A worker that is served, but for what is found."""
    found = {"load_format": "dummy", "mode": "static", "epilogue": None} | found
    pool = SimpleNamespace(req_to_token=torch.zeros(9, 30, dtype=torch.int32))
    return SimpleNamespace(
        gamma=7,
        server_args=SimpleNamespace(load_format=found["load_format"]),
        model_runner=SimpleNamespace(device="cpu", req_to_token_pool=pool),
        _verify_planner=SimpleNamespace(mode_value=found["mode"]),
        _verify_epilogue=found["epilogue"],
    )


def batch(rows, prompts, *, idle=False):
    mode = SimpleNamespace(is_idle=lambda: idle)
    reqs = [SimpleNamespace(origin_input_ids=prompt) for prompt in prompts]
    return SimpleNamespace(reqs=reqs, req_pool_indices=torch.tensor(rows, dtype=torch.int64), forward_mode=mode)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setenv(VARIABLE, RATES)
    step.start(None, made := worker())
    return made


def test_lengths_are_replaced_by_those_of_the_draws(started):
    """Draws go by the prompt, whichever rows requests have."""
    lens = torch.tensor([30, 31, 500])
    drafts, bonus, cap = torch.arange(21).view(3, 7), torch.tensor([1, 2, 3]), object()
    for rows in ([3, 1, 8], [2, 5, 4]):
        step.before_prefill(started, batch(rows, PROMPTS), None)
        step.before_prefill(started, batch([], [], idle=True), None)
        step.before_decode(started, batch(rows, PROMPTS), None)
        given = {"prefix_lens": lens, "draft_tokens": drafts, "bonus": bonus, "cap_trim_lens": cap}
        told = step.accept(dict, correct_len=torch.zeros(3, dtype=torch.int32), **given)
        draws = started.dspark_simulated.draws
        assert draws.keys[rows].tolist() == [crc32(array("q", prompt).tobytes()) for prompt in PROMPTS]
        expected = simulated_accept(draws, torch.tensor(rows), lens, drafts, bonus).accept_lens
        assert told.pop("correct_len").tolist() == expected.tolist() and told == given


@pytest.mark.parametrize(
    ("found", "variables", "named"),
    [
        ({"load_format": "auto"}, {}, "load-format dummy"),
        ({"mode": "compact"}, {}, "SGLANG_RAGGED_VERIFY_MODE=static"),
        ({"epilogue": object()}, {}, "outside of its graph"),
        ({}, {"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN unset"),
        ({}, {VARIABLE: ",".join(["0.5"] * 8)}, "give 7 or fewer"),
    ],
)
def test_what_the_draws_do_not_reach_is_refused(found, variables, named, monkeypatch):
    for name, value in ({VARIABLE: RATES} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        step.start(None, worker(**found))


def test_hooks_are_there_where_the_variable_is_set(monkeypatch):
    registered = []
    monkeypatch.setattr(hooks.HookRegistry, "register", lambda target, handler, kind: registered.append(handler))
    hooks.register_flags()
    assert step.accept not in registered
    monkeypatch.setenv(VARIABLE, RATES)
    hooks.register_flags()
    assert {step.start, step.before_prefill, step.before_decode, step.accept} < {*registered}
