"""Summaries of decode steps in handmade traces."""

import gzip
import json

import pytest
import step_trace
from click.testing import CliRunner
from step_trace import own_kernels, summary_of

from sglang_dspark.errors import ConfigError

# (name, microseconds) in the order in which they run; one graph launch per list.
DRAFT = [("embed", 2), ("gemm", 30), ("lm_head", 60), ("choose_kernel", 5), ("latent", 1), ("choose_kernel", 6)]
VERIFY = [("attention", 40), ("gemm", 160)]
ACCEPT = [("row_stats_kernel", 4), ("judge_kernel", 2), ("gemm", 7), ("_kv_inject_kernel", 3)]


class Tape:
    """A Chrome trace whose activities run one after the other, with 1 us between them."""

    def __init__(self):
        self.events, self.now_us, self.calls = [], 1000.0, 0

    def graph(self, kernels, category="kernel"):
        self.calls += 1
        # The host is ahead of the GPU, and its events come in another order.
        event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1}
        self.events.insert(0, event | {"args": {"correlation": self.calls}})
        for name, us in kernels:
            event = {"ph": "X", "cat": category, "name": name, "ts": self.now_us, "dur": us}
            self.events.append(event | {"args": {"correlation": self.calls, "stream": 7}})
            self.now_us += us + 1

    def step(self, slow=0):
        """A step of seven launches; ``slow`` microseconds more in the target's forward."""
        self.graph([("_prepare_kernel", 1)])
        self.graph(DRAFT)
        self.graph([("_plan_kernel", 2)])
        self.graph([*VERIFY[:1], ("gemm", 160 + slow)])
        self.graph(ACCEPT)
        self.graph([("Memcpy DtoH (Device -> Pinned)", 3)], "gpu_memcpy")
        self.graph([("index_put", 5)])  # for the next step

    def save(self, path):
        document = {"deviceProperties": [{"name": "Some GPU"}], "traceEvents": self.events}
        path.write_bytes(gzip.compress(json.dumps(document).encode()))
        return path


def recorded():
    """Three complete steps, and the beginning of a fourth."""
    tape = Tape()
    for _ in range(4):
        tape.step()
    return tape


GPU_US = 331
OWN_US = 1 + 11 + 2 + 6 + 3


def test_a_step_is_summed_by_kernel(tmp_path):
    summary = summary_of(recorded().save(tmp_path / "trace.json.gz"))
    assert (summary["steps"], summary["launches"]) == (3, 7)
    assert next(iter(summary["kernels"].items())) == ("gemm", {"us": 197, "count": 3})
    assert summary["kernels"]["choose_kernel"] == {"us": 11, "count": 2}
    assert summary["kernels"]["Memcpy DtoH (Device -> Pinned)"]["us"] == 3
    assert summary["gpu_us"] == GPU_US
    assert summary["own_share"] == pytest.approx(OWN_US / GPU_US)
    assert summary["span_us"] == GPU_US + 16  # 1 us after each activity
    assert summary["busy_share"] == pytest.approx(GPU_US / (GPU_US + 16))


def test_what_lies_outside_of_complete_steps_or_is_rare_does_not_count(tmp_path):
    tape = Tape()
    tape.graph([("index_put", 50)])  # of a step whose beginning is not in the trace
    for slow in (0, 2500, 0, 0, 70):
        tape.step(slow)
        if slow == 2500:
            tape.graph([("prefill gemm", 700)])
    summary = summary_of(tape.save(tmp_path / "trace.json.gz"))
    assert (summary["steps"], summary["gpu_us"]) == (4, GPU_US)


def of_another_engine():
    """A tape whose steps no kernel of ours begins, after the end of one and around a prefill."""
    tape = recorded()
    for event in tape.events:
        event["name"] = {"_prepare_kernel": "assign_locations"}.get(event["name"], event["name"])
    tape.graph([("prefill gemm", 700), ("prefill gemm", 700)])
    return tape


def test_step_begins_with_the_kernel_that_is_named(tmp_path):
    path = of_another_engine().save(tmp_path / "trace.json.gz")
    assert summary_of(path, "_plan_kernel")["steps"] == 3
    with pytest.raises(ConfigError, match="no complete decode step"):
        summary_of(path, "_prepare_kernel")


def test_command_sums_all_traces_of_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for number in (1, 2):
        of_another_engine().save(tmp_path / "deep" / f"{number}.trace.json.gz")
    result = CliRunner().invoke(step_trace.main, [str(tmp_path), "--first-kernel", "_plan_kernel"])
    assert result.exit_code == 0, result.output
    summaries = json.loads((tmp_path / "steps.json").read_text())["traces"]
    assert [(each["trace"], each["first_kernel"]) for each in summaries] == [
        ("deep/1.trace.json.gz", "_plan_kernel"),
        ("deep/2.trace.json.gz", "_plan_kernel"),
    ]


def test_a_trace_without_steps_hides_no_other(tmp_path):
    """Steps of SGLang's own worker begin with a kernel that ours have later, if they have it."""
    of_another_engine().save(tmp_path / "1.trace.json.gz")
    tape = of_another_engine()
    for event in tape.events:
        event["name"] = {"_plan_kernel": "_simulated_accept_kernel"}.get(event["name"], event["name"])
    tape.save(tmp_path / "2.trace.json.gz")
    result = CliRunner().invoke(step_trace.main, [str(tmp_path)])
    assert result.exit_code == 1 and "1.trace.json.gz: no complete decode step" in result.output
    (summary,) = json.loads((tmp_path / "steps.json").read_text())["traces"]
    assert (summary["first_kernel"], summary["steps"]) == ("_simulated_accept_kernel", 3)


def test_command_says_that_there_is_no_trace(tmp_path):
    result = CliRunner().invoke(step_trace.main, [str(tmp_path)])
    assert result.exit_code == 1
    assert "record some steps first" in " ".join(result.output.split())


def test_overlapping_activities_are_busy_once(tmp_path):
    tape = Tape()
    tape.step()
    tape.now_us -= 5
    tape.graph([("within", 2)])
    tape.step()
    summary = summary_of(tape.save(tmp_path / "trace.json.gz"))
    assert summary["gpu_us"] == GPU_US + 2
    assert summary["busy_share"] == pytest.approx(GPU_US / (GPU_US + 14))


def test_own_kernels_are_those_of_the_sources():
    assert {"_prepare_kernel", "choose_kernel", "_plan_kernel", "judge_kernel", "_kv_inject_kernel"} <= own_kernels()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"traceEvents": []}')[:-9], "cannot be read"),
        (b"no gzip", "cannot be read"),
        (gzip.compress(b"[]"), "cannot be read"),
        (gzip.compress(b'{"traceEvents": []}'), "no complete decode step"),
    ],
    ids=["cut off", "not compressed", "no trace", "no step"],  # compressed bytes hold the time
)
def test_file_that_is_no_trace_of_steps(tmp_path, content, message):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        summary_of(path)
