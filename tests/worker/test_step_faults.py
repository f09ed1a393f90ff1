"""An exception in a step: the log names the stage, nothing is handed out, and SGLang gets the exception to end over."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_objects import batch, request
from sglang_objects import worker as target_worker
from stage_loop import StageLoop

from sglang_dspark.engine.batch import CachedByBatch
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.scheduler import failed_stage
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.step.packed import DeviceTimer
from sglang_dspark.worker import eager
from sglang_dspark.worker.graphs import ExecutorSelector
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
        worker._target_worker = target_worker()
        worker.schedule = self.schedule
        worker.executors = ExecutorSelector(self.eager)
        worker.request_options = CachedByBatch(partial(BatchOptions.of, max_verify=self.gamma))
        worker.parts, worker.logits_parts, worker.drafter = [], [], self.drafter
        worker.control = StepControl(self.schedule, self.eager.agreement, [], on_gpu=False)
        worker.read = lambda batch, adjusted: self._batch(worker.step)

    def _step(self, number):
        reqs = [request(rid=f"r{place}") for place in range(len(self.texts))]
        running = batch(*reqs, forward_mode=ForwardMode.DECODE, is_extend_in_batch=False, has_grammar=False)
        running.spec_info = SimpleNamespace(room=None)
        self.worker.forward_batch_generation(running, on_publish=self.published.append)


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
    assert failed_stage(RuntimeError()) == "its preparation"
