"""Servers whose processes are forked from one that has imported SGLang: three imports are most of a server's start.

That process, the nursery, is shared by all processes of a test run. What a server does is the same; but its processes
inherit the modules of the one before where they otherwise import them again. Whatever crosses from process to process
is tested by the servers that are started as users start them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, NoReturn

from sglang_dspark.tools.launch import LaunchedServer

# Of the HTTP server, the scheduler and the detokenizer.
IMPORTS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # imports every model
    "sglang_dspark.worker.worker",
)


class Forked:
    """The part of ``subprocess.Popen`` that :class:`LaunchedServer` needs, for a process of a nursery.

    Args:
        imported: variables that the nursery's process has on top of those of this process: what it imports may depend
            on them.
        arguments: arguments of ``python -m sglang.launch_server``, or of the script.
        env: all variables of the new process.
        log_path: file that gets what it prints.
        script: Python code to run in place of the server.
    """

    def __init__(
        self,
        imported: Mapping[str, str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        script: str = "",
    ) -> None:
        order = {"arguments": arguments, "env": dict(env), "log": str(log_path), "script": script}
        pid = b""
        while not pid:  # a nursery that cannot be reached may be about to end
            started = start_nursery(imported)
            with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
                connection.connect(_address(imported))
                connection.sendall(json.dumps(order).encode() + b"\n")
                self._replies = connection.makefile("rb", buffering=0)  # readable when the exit status is there
                pid = self._replies.readline()
            assert pid or started is None or started.wait() == 0, "SGLang cannot be imported: see above"
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, None while it lives."""
        ended = self.returncode is None and select.select([self._replies], [], [], 0)[0]
        return self.wait() if ended else self.returncode

    def wait(self) -> int:
        """Return its exit status as soon as it has ended."""
        if self.returncode is None:
            self.returncode = int(self._replies.readline())
            self._replies.close()
        return self.returncode


class ForkedServer(LaunchedServer):
    """A server of a nursery whose process has these variables when it imports SGLang."""

    def __init__(self, imported: Mapping[str, str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._imported = imported

    def _start(self, log: IO[bytes]) -> Any:
        return Forked(self._imported, self._command[3:], self._env, self.log_path)


def _address(imported: Mapping[str, str]) -> str:
    """Return the socket of this run's nursery with these variables. It is of no file, and free when nothing listens."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    named = hashlib.sha256(json.dumps([run, sorted(imported.items())]).encode())
    return f"\0nursery-{named.hexdigest()}"


def start_nursery(imported: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Return the process that listens from now on; None if one does already."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(imported))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        listener.listen()
        owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        command = [sys.executable, __file__, str(listener.fileno()), str(owner)]
        silent, env = subprocess.DEVNULL, {**os.environ, **imported}
        return subprocess.Popen(command, env=env, pass_fds=[listener.fileno()], stdin=silent, stdout=silent)


def _nurse(listener: socket.socket, owner: int) -> None:
    """Fork what clients ask for, until the process ``owner`` ends."""
    end = os.pidfd_open(owner)
    for name in IMPORTS:
        __import__(name)
    for plugin in entry_points(group="sglang.srt.plugins"):
        plugin.load()  # every server imports those of all packages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended need no parent to say so
    while end not in select.select([listener, end], [], [])[0]:
        client, _ = listener.accept()
        with client:
            order = client.makefile().readline() if _is_ours(client) else ""
            if order and os.fork() == 0:
                listener.close()
                _keep(client, json.loads(order))
                return
    _end()


def _end() -> NoReturn:
    """End this process at once: to take so many modules down would take seconds."""
    sys.stdout.flush()
    os._exit(0)


def _is_ours(client: socket.socket) -> bool:
    """Return whether it belongs to the same user: such addresses are open to all users of a machine."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _keep(client: socket.socket, order: dict[str, Any]) -> None:
    """Fork the process that the client wants; tell its id, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ConnectionError):  # the client may have gone
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        _end()
    os.setsid()
    client.sendall(b"%d\n" % os.getpid())
    client.close()
    _serve(order)


def _serve(order: dict[str, Any]) -> None:
    """Become the server, or run the script."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(order["env"])
    importlib.import_module("sitecustomize").at_start()
    # Torch read this variable when it was imported, for all servers.
    sys.modules["torch._dynamo.config"].disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    random.seed()  # or every server would have the same seed, and look for the same ports
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    # SGLang asks for "spawn" here: its processes would import everything once more.
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=True)
    if order["script"]:
        exec(order["script"], {"__name__": "__main__"})
        _end()
    else:
        runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    _nurse(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
