"""Tests of the self-check: what is right passes in every form, and what is wrong ends the start by name."""

import functools
import json

import dspark_kernels
import pytest
import torch
from dspark_kernels import kernels_anywhere, silu_mul
from faults import GRAPH, VARIABLE, faulty
from random_start import RandomStart

from sglang_dspark.errors import EngineError
from sglang_dspark.worker import self_check
from sglang_dspark.worker.kernel_comparison import form_of
from sglang_dspark.worker.self_check import SelfCheck

CPU = torch.device("cpu")
REMEDY = "--speculative-dspark-engine builtin"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No form has been checked, and there is time for all."""
    monkeypatch.setattr(self_check, "CACHE", tmp_path / "checked")
    monkeypatch.setattr(self_check, "LIMIT_S", 1000.0)


def started(monkeypatch, tmp_path, seed, **how):
    return RandomStart(monkeypatch, seed, tmp_path / "draft").check(**how).describe()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_random_forms_agree(monkeypatch, tmp_path, seed):
    found = started(monkeypatch, tmp_path, seed)
    assert found["kernels"] >= 12 and found["forms"] > 50 and found["graphs"] >= 2
    assert (found["unchecked"], found["left_for_next_start"]) == ({}, 0)


@pytest.mark.parametrize(
    "name",
    [
        *("add_norm", "silu_mul", "qk_norm_rope", "window_attention"),
        *("draft_block", "block_confidence", "accept", "prepare", "plan_top", "plan_staged"),
    ],
)
def test_a_wrong_kernel_ends_the_start(monkeypatch, tmp_path, name):
    function = getattr(dspark_kernels, name)
    monkeypatch.setattr(function, "kernel", faulty(function))
    with pytest.raises(EngineError, match=f"found a fault in {name} on .*{REMEDY}"):
        started(monkeypatch, tmp_path, 3)


def test_a_kernel_that_writes_the_wrong_slot_ends_the_start(monkeypatch, tmp_path):
    function = dspark_kernels.kv_inject

    @functools.wraps(function.kernel)
    def run(*, slots, original=function.kernel, **given):
        original(slots=slots + 1, **given)

    monkeypatch.setattr(function, "kernel", run)
    with pytest.raises(EngineError, match="found a fault in kv_inject"):
        started(monkeypatch, tmp_path, 3)


def test_a_wrong_graph_ends_the_start(monkeypatch, tmp_path):
    """A replay that leaves its output as it was."""
    monkeypatch.setenv(VARIABLE, GRAPH)
    with pytest.raises(EngineError, match=f"found a fault in {GRAPH} on .*--disable-cuda-graph"):
        started(monkeypatch, tmp_path, 3, warms_up=False)


@pytest.fixture
def calls(monkeypatch):
    """The kernels of ``silu_mul`` that ran, by width."""
    ran = []

    @functools.wraps(silu_mul.kernel)
    def run(gate_up, original=silu_mul.kernel):
        ran.append(gate_up.shape[-1])
        return original(gate_up)

    monkeypatch.setattr(silu_mul, "kernel", run)
    return ran


def check(*widths, seconds=None):
    """A start that calls ``silu_mul`` with rows of so many numbers; what it says of itself."""
    found = SelfCheck(CPU)
    if seconds is not None:
        found._seconds = seconds
    with kernels_anywhere(), found.looking_on():
        for width in widths:
            silu_mul(torch.randn(2, width))
    found.finish()
    return found.describe()


def test_a_form_is_checked_once_and_remembered(calls, monkeypatch, tmp_path):
    assert check(20, 20, 40)["forms"] == 2
    assert calls == [20, 20, 20, 40, 40]  # once more where it is checked
    calls.clear()
    assert check(40, 20, 60)["forms"] == 3
    assert calls == [40, 20, 60, 60]
    calls.clear()
    monkeypatch.setattr(self_check, "__version__", "9")
    check(20)
    assert calls == [20, 20]


@pytest.mark.parametrize("content", ["", "{}", "[1, 2", "\x00", '["x", 3]'])
def test_a_damaged_record_is_no_record(calls, content, tmp_path):
    check(20)
    [path] = (tmp_path / "checked").iterdir()
    path.write_text(content)
    assert check(20)["forms"] == 1
    assert calls == [20] * 4
    assert len(json.loads(path.read_text())) >= 1


def test_a_record_that_cannot_be_written_costs_a_warning(calls, monkeypatch, tmp_path, caplog):
    (tmp_path / "checked").write_text("no folder")
    assert check(20)["forms"] == 1
    assert "the next start checks the same kernels again" in caplog.text


def test_a_start_takes_so_many_seconds_and_the_next_one_goes_on(calls, caplog):
    found = check(20, 40, 40, seconds=self_check.LIMIT_S + 1)
    assert (found["forms"], found["left_for_next_start"], calls) == (0, 3, [20, 40, 40])
    assert "the next start checks the forms of 3 more calls" in caplog.text
    assert check(20, 40)["left_for_next_start"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("no such device")])
def test_a_reference_that_cannot_run_is_no_finding(calls, monkeypatch, caplog, error):
    def fails(gate_up):
        raise error

    monkeypatch.setattr(silu_mul, "reference", fails)
    found = check(20)
    assert ([*found["unchecked"]], found["forms"]) == (["silu_mul"], 0)
    assert "silu_mul cannot be checked in every form" in caplog.text


def test_a_result_of_another_form_is_wrong(monkeypatch):
    monkeypatch.setattr(silu_mul, "kernel", functools.wraps(silu_mul.kernel)(lambda gate_up: gate_up))
    with pytest.raises(EngineError, match=r"result 0 is float32 \[2, 20\] and should be float32 \[2, 10\]"):
        check(20)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_is_a_wrong_number(monkeypatch, value):
    kernel = silu_mul.kernel
    wrong = functools.wraps(kernel)(lambda gate_up: kernel(gate_up).index_fill(0, torch.tensor([1]), value))
    monkeypatch.setattr(silu_mul, "kernel", wrong)
    with pytest.raises(EngineError, match="10 of 20 numbers of result 0"):
        check(20)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float16)),
        (torch.zeros(4, 4), torch.zeros(4, 4).T[:, :4].t().T),
        (torch.zeros(16), torch.zeros(17)[1:]),
        ((torch.zeros(4), None), (torch.zeros(4), torch.zeros(4))),
        ({"causal": True}, {"causal": False}),
        (16, 17),
    ],
)
def test_forms_differ(one, other):
    assert form_of(one) != form_of(other)


def test_pools_of_about_the_same_size_have_one_form():
    assert form_of(torch.empty(100_000, 8)) == form_of(torch.empty(110_000, 8)) != form_of(torch.empty(110_001, 8))
