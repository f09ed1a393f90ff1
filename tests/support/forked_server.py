"""Servers whose processes are forked from one that has imported SGLang: three imports are most of a server's start.

What a server does is the same; but its processes inherit the modules of the one before where they otherwise import
them anew. Whatever crosses from process to process is tested by the servers that are started as users start them.
"""

from __future__ import annotations

import contextlib
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

from sglang_dspark.files import write_text_whole
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

    def fork(self, arguments: list[str], env: dict[str, str], log_path: Path, script: str = "") -> int:
        """Start ``python -m sglang.launch_server`` with these arguments, or a script; its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"arguments": arguments, "env": env, "log": str(log_path), "script": script}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def run(self, script: str, arguments: list[str], env: dict[str, str], log_path: Path) -> str:
        """What a script prints; it has to end well."""
        log_path.write_text("")
        status = _Forked(self.fork(arguments, env, log_path, script), log_path).wait()
        printed = log_path.read_text()
        assert status == 0, printed
        return printed

    def close(self) -> None:
        """End it. Servers that it forked go on."""
        self._process.communicate()


class _Forked:
    """The part of ``subprocess.Popen`` that :class:`LaunchedServer` needs. Its parent notes how it ended."""

    def __init__(self, pid: int, log_path: Path) -> None:
        self.pid, self._status = pid, _status_path(log_path)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, None while it lives."""
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
            self._status.unlink()
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status


class ForkedServer(LaunchedServer):
    """A server of the nursery."""

    def __init__(self, nursery: Nursery, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._nursery = nursery

    def _start(self, log: IO[bytes]) -> Any:
        return _Forked(self._nursery.fork(self._command[3:], self._env, self.log_path), self.log_path)


def _status_path(log_path: Path) -> Path:
    """Where the nursery writes the exit status of a server."""
    return log_path.with_suffix(".status")


def _serve(order: dict[str, Any]) -> None:
    """Become the server, or run the script."""
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
    if order["script"]:
        exec(order["script"], {"__name__": "__main__"})
    else:
        runpy.run_module("sglang.launch_server", run_name="__main__")


def _nurse() -> None:
    for name in IMPORTS:
        __import__(name)
    logs: dict[int, Path] = {}

    def note_ends(*_: Any) -> None:
        for pid in list(logs):
            # Another end may interrupt this function, which then has collected some of them already.
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    write_text_whole(_status_path(logs.pop(pid)), str(os.waitstatus_to_exitcode(status)))

    signal.signal(signal.SIGCHLD, note_ends)
    for line in sys.stdin:
        order = json.loads(line)
        # One that ends at once is in the table by then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            _serve(order)
            return
        logs[child] = Path(order["log"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _nurse()
