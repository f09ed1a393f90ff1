"""Servers whose processes are forked from one that has imported SGLang: three imports are most of a server's start.

What a server does is the same; but its processes inherit the modules of the one before where they otherwise import
them anew. Whatever crosses from process to process is tested by the servers that are started as users start them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from sglang_dspark.tools.launch import LaunchedServer

# Of the HTTP server, the scheduler and the detokenizer.
IMPORTS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # imports every model
    "sglang_dspark.worker.worker",
)


class Nursery:
    """The process that has imported SGLang; ended with its input, and so with the process that made it."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(self, arguments: list[str], env: dict[str, str], log_path: Path) -> int:
        """Start ``python -m sglang.launch_server`` with these arguments; its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"arguments": arguments, "env": env, "log": str(log_path)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it. Servers that it forked go on."""
        self._process.communicate()


class _Forked:
    """The part of ``subprocess.Popen`` that :class:`LaunchedServer` needs; its parent is the nursery."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """None while it lives. How it ended, only the nursery knew."""
        return None if Path(f"/proc/{self.pid}").exists() else -1

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


class ForkedServer(LaunchedServer):
    """A server of the nursery."""

    def __init__(self, nursery: Nursery, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._nursery = nursery

    def _start(self, log: IO[bytes]) -> Any:
        return _Forked(self._nursery.fork(self._command[3:], self._env, self.log_path))


def _serve(order: dict[str, Any]) -> None:
    """Become the server."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    silence = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((silence, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["env"])
    random.seed()  # or every server would have the same seed, and look for the same ports
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    # SGLang asks for "spawn" here: its processes would import everything once more.
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=True)
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _nurse() -> None:
    for name in IMPORTS:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(json.loads(line))
            return
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _nurse()
