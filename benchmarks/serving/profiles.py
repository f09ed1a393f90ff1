"""Have a server record some of its decode steps while users are answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore

from serving.client import Sampling, ask_all
from serving.prompts import Prompt
from sglang_dspark.errors import LaunchError
from sglang_dspark.tools.launch import LaunchedServer

LIMIT_S = 60.0
"""For the first tokens of all users, and for the trace."""


def record_steps(
    server: LaunchedServer, prompts: Sequence[Prompt], sampling: Sampling, steps: int, activity: str, folder: Path
) -> None:
    """Write a trace of the server's next steps into a new folder, as soon as the user of each prompt has a token.

    Args:
        activity: what is recorded, ``GPU`` or ``CPU``.

    Raises:
        LaunchError: the server wrote none.
        ReplyError: it failed a request.
    """
    folder.mkdir(parents=True)
    first, recorded = Semaphore(0), Event()

    def keep_asking() -> None:
        while not recorded.is_set():
            ask_all(server.url, prompts, sampling, len(prompts), first.release)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(keep_asking)
        try:
            end = time.monotonic() + LIMIT_S
            if not all(first.acquire(timeout=LIMIT_S) for _ in prompts):
                raise LaunchError(f"{server.url} answered too few of {len(prompts)} users in {LIMIT_S:g} s")
            what = {"num_steps": steps, "activities": [activity], "with_stack": False, "record_shapes": False}
            server.post("/start_profile", {"output_dir": str(folder), **what})
            while not any(folder.rglob("*.trace.json.gz")):
                if time.monotonic() > end:
                    raise LaunchError(f"{server.url} wrote no trace of {steps} steps to {folder}")
                time.sleep(0.1)
            server.get_json("/server_info")  # the scheduler answers when the file is complete
        finally:
            recorded.set()
        asked.result()
