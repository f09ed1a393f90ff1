"""An exception in a step: the log names the stage, nothing is handed out, and SGLang gets the exception to end over."""

import logging
from types import SimpleNamespace

import pytest
import torch
from stage_loop import StageLoop

from sglang_dspark.engine.scheduler.faults import part_of
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.device_time import DeviceTimer
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.worker.executors import eager
from sglang_dspark.worker.worker import DSparkWorker

# What each stage calls.
CALLED = {
    "draft": lambda loop: (loop.drafter, "propose"),
    "plan": lambda loop: (eager, "build_plan"),
    "verify": lambda loop: (loop.eager, "forward"),
    "accept": lambda loop: (eager, "accept"),
    "commit": lambda loop: (loop.drafter, "commit"),
}


def nothing(*args, **kwargs):
    return None


class WorkerLoop(StageLoop):
    """Decodes by ``DSparkWorker.forward_batch_generation``, on the real executor.

    Attributes:
        published: lengths that were handed to the scheduler.
    """

    def __init__(self):
        super().__init__(schedule="static")
        self.published = []
        self.worker = worker = DSparkWorker.__new__(DSparkWorker)
        worker.step, worker.timer, worker.relay = 0, DeviceTimer(torch.device("cpu")), None
        worker._target_worker = SimpleNamespace()
        worker.schedule = self.schedule
        worker.executors = SimpleNamespace(select=lambda step, decision: self.eager)
        worker.request_options = SimpleNamespace(read=lambda reqs: SimpleNamespace(traced=False))
        worker.parts = []
        worker.check_logits = None
        decision = StepDecision(self.gamma, FixedLength())
        worker.control = SimpleNamespace(choose=lambda batch, options: decision)
        worker.read = lambda batch, adjusted: self._batch(worker.step)

    def _step(self, number):
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        reqs = [SimpleNamespace(rid=f"r{place}") for place in range(len(self.texts))]
        batch = SimpleNamespace(reqs=reqs, forward_mode=mode, is_extend_in_batch=False)
        self.worker.forward_batch_generation(batch, on_publish=self.published.append)


def failed(stage, error, caplog, monkeypatch):
    """Return a loop in whose first step something below ``stage`` has raised ``error``."""
    loop = WorkerLoop()

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(*CALLED[stage](loop), fail)
    with caplog.at_level(logging.ERROR), pytest.raises(type(error)) as raised:
        loop.serve([case.prompt_ids for case in loop.golden.cases[:3]], 8)
    assert raised.value is error
    return loop


@pytest.mark.parametrize("stage", CALLED)
def test_the_log_names_the_stage_that_failed(stage, caplog, monkeypatch):
    loop = failed(stage, RuntimeError("a kernel went wrong"), caplog, monkeypatch)
    [record] = caplog.records
    expected = f"step 1 of 3 requests failed in decode: {stage} (RuntimeError: a kernel went wrong)"
    assert expected in record.getMessage()
    # Lengths are known to the scheduler when the outcome is, and no sooner; no token is.
    assert len(loop.published) == (stage == "commit")
    assert [len(trace) for trace in loop.traces] == [0, 0, 0]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (torch.OutOfMemoryError("tried to allocate 1.1 GiB"), "lower --mem-fraction-static or --max-running-requests"),
        (torch.AcceleratorError("device-side assert", 710), "CUDA_LAUNCH_BLOCKING=1"),
    ],
    ids=["memory", "device"],
)
def test_faults_of_the_device_come_with_a_remedy(error, remedy, caplog, monkeypatch):
    failed("accept", error, caplog, monkeypatch)
    assert remedy in caplog.text
    assert str(error) in caplog.text


def test_what_fails_before_a_step_begins_has_no_stage():
    assert part_of(RuntimeError()) == "its preparation"
