"""A server that is told to end: it finishes what is under way."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from golden_server import DSPARK, TARGET, endless, in_background, wait_for_running

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

NUM_TOKENS = 800


@pytest.mark.thorough
def test_sigterm_lets_requests_finish():
    flags = (*CPU_FLAGS, "--dtype", "float32", *DSPARK, "--speculative-dspark-schedule", "static")
    answers = []
    body = endless([5, 6, 7], NUM_TOKENS, speculation={"max_verify": 1})
    with LaunchedServer(TARGET, *flags, env=CPU_ENV) as server:
        requests = [
            in_background(lambda: answers.append(server.post_json("/generate", body)["output_ids"])) for _ in range(3)
        ]
        wait_for_running(server, len(requests))
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        for request in requests:
            request.join(60)
        assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(requests)
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone == [process]
        assert server.exit_status is not None
