"""Decode steps of a running server under SGLang's profiler, while users keep it busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.client import Sampling, request_body
from serving.prompts import Prompt
from sglang_dspark.errors import DSparkError
from sglang_dspark.tools.launch import LaunchedServer

WARM_UP_TOKENS = 32  # of each user in the mean, before anything is profiled
PROFILE_ID = "steps"
TRACE_FILE = f"{PROFILE_ID}-TP-0.trace.json.gz"  # SGLang's name for the first rank's
EXTRA_STEPS = 2  # SGLang stops ahead of the last one, and the one before has no beginning of a next one behind it
POLL_S = 0.05
LIMIT_S = 600.0


def record_steps(
    server: LaunchedServer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_steps: int,
    activities: Sequence[str],
    folder: Path,
) -> Path:
    """Record the trace of ``num_steps`` decode steps for one user per prompt, in ``folder``.

    Args:
        server: decodes with DSPARK.
        sampling: answers have to last until the trace is written.
        activities: ``CPU`` and ``GPU``, as SGLang calls them.

    Raises:
        DSparkError: an answer ended, not all users were served at a time, or nothing happened for ten minutes.
        OSError: the server refused a request or is gone.
    """
    trace = folder.resolve() / TRACE_FILE
    profile = {
        "output_dir": str(trace.parent),
        "profile_id": PROFILE_ID,
        "num_steps": num_steps + EXTRA_STEPS,
        "activities": list(activities),
        # Both cost the host time in every operation.
        "with_stack": False,
        "record_shapes": False,
    }
    enough = _stats(server)["committed_tokens"] + WARM_UP_TOKENS * len(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = [request_body(prompt, sampling) | {"stream": False, "stream_options": None} for prompt in prompts]
        answers = [pool.submit(server.post_json, sampling.path, body) for body in bodies]
        try:
            _wait(lambda: _stats(server)["committed_tokens"] >= enough, answers)
            before = _stats(server)
            server.post("/start_profile", profile)
            _wait(trace.exists, answers)
            # The scheduler answers when it has written all of the file.
            after = _stats(server)
        finally:
            with suppress(OSError):  # of a server that is no longer there
                server.post("/abort_request", {"rid": "", "abort_all": True})
    requests, steps = (after[name] - before[name] for name in ("rounds", "steps"))
    if requests != len(prompts) * steps:
        raise DSparkError(
            f"{requests / steps:.1f} of {len(prompts)} users were served at a time; lower --concurrency, or raise "
            "--max-tokens or the server's --max-running-requests"
        )
    return trace


def _wait(is_done: Callable[[], bool], answers: Sequence[Future[Any]]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_done():
        for answer in answers:
            if answer.done():
                answer.result()  # raises what the request failed with
                raise DSparkError("an answer ended before the profile did; raise --max-tokens")
        if time.monotonic() > end:
            raise DSparkError(f"the server has not written a trace after {LIMIT_S:.0f} s; see its log")
        time.sleep(POLL_S)


def _stats(server: LaunchedServer) -> dict[str, Any]:
    return dict(server.get_json("/dspark/stats", timeout_s=LIMIT_S))
