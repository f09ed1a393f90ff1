"""Have a server record some of its decode steps while users are answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from serving.client import Sampling, ask_all
from serving.prompts import Prompt
from sglang_dspark.errors import LaunchError
from sglang_dspark.tools.launch import LaunchedServer

BUSY_S = 1.5
"""Until the prompts of all users have been encoded."""
ANSWERS = 8
"""Longer answers than those of the sweep: no user may have ended before the last step."""
WRITTEN_S = 60.0


def record_steps(
    server: LaunchedServer, prompts: Sequence[Prompt], sampling: Sampling, steps: int, activity: str, folder: Path
) -> None:
    """Write a trace of the server's next steps, while each prompt's user waits for a long answer, into a new folder.

    Args:
        activity: what is recorded, ``GPU`` or ``CPU``.

    Raises:
        LaunchError: the server wrote none.
    """
    folder.mkdir(parents=True)
    longer = replace(sampling, max_tokens=ANSWERS * sampling.max_tokens, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, server.url, prompts, longer, len(prompts))
        time.sleep(BUSY_S)
        what = {"num_steps": steps, "activities": [activity], "with_stack": False, "record_shapes": False}
        server.post("/start_profile", {"output_dir": str(folder), **what})
        end = time.monotonic() + WRITTEN_S
        while not any(folder.rglob("*.trace.json.gz")):
            if time.monotonic() > end or asked.done():
                raise LaunchError(f"{server.url} wrote no trace of {steps} steps to {folder}")
            time.sleep(0.1)
        server.get_json("/server_info")  # the scheduler answers when the file is complete
        server.post("/abort_request", {"rid": "", "abort_all": True})
        asked.result()
