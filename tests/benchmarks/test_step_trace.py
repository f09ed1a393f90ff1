"""Stages of decode steps in handmade traces."""

import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from step_tape import DRAFT, VERIFY, Tape, recorded
from step_trace import main, summary_of
from tracing.chrome import gpu_activities
from tracing.stages import KERNEL_STAGES, split_steps
from tracing.summary import busy_us

from sglang_dspark.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]

STEP_US = {
    "prepare": 1,
    "drafter network": 100,
    "Markov walk": 12,
    "confidence": 4,
    "plan": 2,
    "target forward": 200,
    "accept": 6,
    "commit": 10,
    "copies": 3,
    "other": 5,
}


def times(summary):
    return {stage: part["us"] for stage, part in summary["stages"].items()}


def test_every_activity_counts_to_its_stage():
    summary = recorded().summary()
    assert times(summary) == STEP_US
    counts = {stage: part["activities"] for stage, part in summary["stages"].items()}
    graphs = {"drafter network": 4, "Markov walk": 3, "confidence": 2, "target forward": 2, "accept": 2, "commit": 2}
    assert counts == graphs | dict.fromkeys(("prepare", "plan", "copies", "other"), 1)
    assert {part["launches"] for part in summary["stages"].values()} == {1}


def test_share_outside_the_forwards():
    summary = recorded().summary()
    assert summary["gpu_us"] == 343
    assert summary["outside_forwards_share"] == pytest.approx(43 / 343)
    assert sum(part["share"] for part in summary["stages"].values()) == pytest.approx(1)


@pytest.mark.parametrize(("kind", "graphs"), [("joined_step", 2), ("parked_step", 1)])
def test_graphs_of_several_stages_are_divided(kind, graphs):
    tape = Tape()
    for _ in range(3):
        getattr(tape, kind)()
    summary = tape.summary()
    drafted = ("drafter network", "Markov walk", "confidence") if kind == "parked_step" else ()
    assert times(summary) == STEP_US | dict.fromkeys(drafted, 0)
    assert (summary["graph_launches"], summary["kernel_launches"]) == (graphs, 2)


def test_launches_and_time_of_a_step():
    summary = recorded().summary()
    assert (summary["graph_launches"], summary["kernel_launches"], summary["copy_launches"]) == (3, 3, 1)
    assert summary["activities"] == 19
    assert (summary["busy_us"], summary["span_us"]) == (343, 343 + 19)  # 1 us behind each
    assert summary["busy_share"] == pytest.approx(343 / 362)


def test_steps_reach_from_prepare_to_prepare():
    tape = Tape()
    tape.graph(VERIFY)  # of a step whose beginning is not in the trace
    tape.kernel("index_put", 5)
    for _ in range(3):
        tape.step()
    first, second = split_steps(gpu_activities(tape.document))
    for step in (first, second):
        assert (step.activities[0].name, step.activities[-1].name) == ("_prepare_kernel", "index_put")
        assert step.span_us == 362


def test_kernels_that_another_program_interrupts_do_not_count_as_long_ones():
    tape = Tape()
    for slow in range(3):  # another kernel in every step
        draft = [(name, us + 2500 * (place == slow)) for place, (name, us) in enumerate(DRAFT)]
        verify = [(name, us + 2500 * (place == slow)) for place, (name, us) in enumerate(VERIFY)]
        tape.step(draft, verify)
    tape.step()
    summary = tape.summary()
    assert times(summary) == STEP_US
    assert summary["busy_us"] == 343 + 5000  # under way nevertheless


def test_kernels_of_few_steps_take_no_time_in_the_median():
    tape = Tape()
    for number in range(4):
        if number == 1:
            tape.kernel("prefill gemm", 700)
        tape.step()
    assert times(tape.summary()) == STEP_US


def test_plain_steps_and_acceptance_launch_by_launch():
    tape = Tape()
    for _ in range(3):
        tape.kernel("_prepare_kernel", 1)
        tape.graph(VERIFY)
        for name in ("row_stats_kernel", "judge_kernel", "race_kernel", "finish_kernel", "_kv_inject_kernel"):
            tape.kernel(name, 2)
    summary = tape.summary()
    found = {stage: us for stage, us in times(summary).items() if us}
    assert found == {"prepare": 1, "target forward": 200, "accept": 8, "commit": 2}
    assert (summary["stages"]["accept"]["launches"], summary["stages"]["drafter network"]["launches"]) == (4, 0)


def test_overlapping_activities_are_busy_once():
    tape = Tape()
    tape.kernel("long", 10)
    tape.now_us -= 5
    tape.kernel("within", 2)
    tape.kernel("beyond", 10)
    activities = gpu_activities(tape.document)
    assert [each.start_us for each in activities] == [1000, 1006, 1009]
    assert busy_us(activities) == 19


def test_kernels_are_called_as_in_the_sources():
    kernels = {
        name: path.name
        for path in (REPOSITORY / "kernels" / "dspark_kernels").rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(KERNEL_STAGES) <= set(kernels)
    judging = {name for name, file in kernels.items() if "accept" in file}
    assert len(judging) > 5
    assert {name for name, stage in KERNEL_STAGES.items() if stage == "accept"} >= judging


def test_command_prints_and_writes_the_summary(tmp_path):
    trace, output = recorded().save(tmp_path / "trace.json.gz"), tmp_path / "new" / "step.json"
    result = CliRunner().invoke(main, ["summarise", str(trace), str(trace), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "3 graphs, 3 kernels, 1 copies" in result.output
    assert "12.5% of the GPU time" in result.output
    written = json.loads(output.read_text())
    assert [each["trace"] for each in written["traces"]] == ["trace.json.gz"] * 2
    assert written["traces"][0]["stages"]["Markov walk"]["us"] == 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"traceEvents": []}')[:-9], "cannot be read"),
        (b"no gzip", "cannot be read"),
        (gzip.compress(b"[]"), "has no traceEvents"),
        (gzip.compress(b'{"traceEvents": []}'), "no complete step"),
    ],
    ids=["cut off", "not compressed", "no trace", "no step"],  # compressed bytes hold the time
)
def test_file_that_is_no_trace_of_steps(tmp_path, content, message):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        summary_of(path)
    result = CliRunner().invoke(main, ["summarise", str(path)])
    assert result.exit_code == 1 and str(path) in result.output
