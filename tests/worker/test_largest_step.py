"""The step that start-up takes to hold memory: the largest that can come, and what is said where it does not fit."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang_objects import model_config, partly, runner
from sglang_objects import table as request_table
from sglang_objects import worker as target_worker
from stage_loop import StageLoop

from sglang_dspark.engine.part import LogitsPart
from sglang_dspark.errors import ConfigError
from sglang_dspark.step.state import TargetOutput
from sglang_dspark.worker.warm_up import hold_largest_step, on_stream_of_steps

REQUESTS, SLOTS, VOCAB_SIZE = 5, 40, 256


class Target:
    """Verifies nothing, but has logits of a row as a target has."""

    def __init__(self, loop, error=None):
        self.rows, self._error = [], error
        self._vocab_size, self._width = loop.drafter.config.vocab_size, loop.drafter.model.fc.in_features
        loop.drafter.allocate(SLOTS + 1, torch.float32)
        loop.eager.forward = self._verify

    def _verify(self, step, plan):
        if self._error is not None:
            raise self._error
        rows = len(plan.input_ids)
        self.rows.append((len(step), rows, step.rows.any_greedy))
        logits = torch.zeros(rows, self._vocab_size)
        return TargetOutput(LogitsProcessorOutput(next_token_logits=logits), torch.zeros(rows, self._width))


def worker():
    return target_worker(
        max_running_requests=REQUESTS,
        req_to_token_pool=request_table(9, 32),
        token_to_kv_pool=partly(MHATokenToKVPool, size=SLOTS),
        device="cpu",
        model_config=model_config(vocab_size=VOCAB_SIZE),
        spec_algorithm=None,
    )


def test_every_request_is_sampled_and_has_all_drafts():
    loop, table = StageLoop(schedule="static"), worker()
    target = Target(loop)
    hold_largest_step(loop.eager, table, loop.gamma)
    assert target.rows == [(REQUESTS, REQUESTS * (loop.gamma + 1), False)]
    assert not table.model_runner.req_to_token_pool.req_to_token.any()


def test_what_features_hold_lies_beside_the_step():
    """Or the step would take memory that the allocator has not handed out yet."""
    loop, seen = StageLoop(schedule="static"), []
    target = Target(loop)

    class Holding(LogitsPart):
        @contextmanager
        def held(self, requests):
            seen.append((requests, len(target.rows)))
            yield
            seen.append((requests, len(target.rows)))

    hold_largest_step(loop.eager, worker(), loop.gamma, [Holding(), LogitsPart()])
    assert seen == [(REQUESTS, 0), (REQUESTS, 1)]


def test_memory_that_is_not_there_ends_the_start():
    loop = StageLoop(schedule="static")
    Target(loop, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.2 GiB"))
    with pytest.raises(ConfigError, match=r"--max-running-requests=5 sampled requests with 7 drafts.*--mem-fraction"):
        hold_largest_step(loop.eager, worker(), loop.gamma)


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_is_held_for_the_stream_of_steps(monkeypatch, overlap):
    """Memory that is given back on one stream is handed out on no other by torch's allocator."""
    done = []

    @contextmanager
    def stream(chosen):
        done.append(chosen)
        yield
        done.append("left")

    device = SimpleNamespace(synchronize=lambda: done.append("waited"), stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    with on_stream_of_steps(runner(device="cuda", forward_stream="forward"), overlap=overlap):
        done.append("step")
    assert done == ["waited", "forward" if overlap else None, "step", "left", "waited"]
