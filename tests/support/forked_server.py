"""Servers whose processes are forked from one that has imported SGLang: three imports are most of a server's start.

What a server does is the same; but its processes inherit the modules of the one before where they otherwise import
them again. Whatever crosses from process to process is tested by the servers that are started as users start them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

from sglang_dspark.files import atomic_write_text
from sglang_dspark.tools.launch import LaunchedServer

# Of the HTTP server, the scheduler and the detokenizer.
IMPORTS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # imports every model
    "sglang_dspark.worker.worker",
)


class Nursery:
    """A process that has imported SGLang. All processes of a test run share it, and it ends with the last of them.

    Args:
        env: variables on top of those of this process. What is imported may depend on them.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        named = hashlib.sha256(json.dumps([run, sorted(env.items())]).encode())
        address = f"\0nursery-{named.hexdigest()}"  # of no file: it is free again when nobody listens
        greeting = ""
        while not greeting:  # one that others are through with may end now
            started = _listening(address, {**os.environ, **env})
            self._connection = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(ConnectionError):
                self._connection.connect(address)
                self._replies = self._connection.makefile()
                greeting = self._replies.readline()
            if not greeting:
                self._connection.close()
                assert started is None or started.wait() == 0, "SGLang cannot be imported: see above"

    def fork(self, arguments: list[str], env: dict[str, str], log_path: Path, script: str = "") -> int:
        """Start ``python -m sglang.launch_server`` with these arguments, or a script; its process id."""
        order = {"arguments": arguments, "env": env, "log": str(log_path), "script": script}
        self._connection.sendall(json.dumps(order).encode() + b"\n")
        reply = self._replies.readline()
        assert reply, "the nursery has ended"
        return int(reply)

    def run(self, script: str, arguments: list[str], env: dict[str, str], log_path: Path) -> str:
        """Return what a script prints; it has to end well."""
        log_path.write_text("")
        status = _Forked(self.fork(arguments, env, log_path, script), log_path).wait()
        printed = log_path.read_text()
        assert status == 0, printed
        return printed

    def close(self) -> None:
        """Let go of it. Servers that it forked go on."""
        self._replies.close()
        self._connection.close()


def _listening(address: str, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """The process that listens there from now on; None where one does already."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno())]
        silent = subprocess.DEVNULL
        return subprocess.Popen(command, env=dict(env), pass_fds=[listener.fileno()], stdin=silent, stdout=silent)


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
    """Return where the nursery writes the exit status of a server."""
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
    # Torch read this variable when it was imported, for all servers.
    sys.modules["torch._dynamo.config"].disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    random.seed()  # or every server would have the same seed, and look for the same ports
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    # SGLang asks for "spawn" here: its processes would import everything once more.
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=True)
    if order["script"]:
        exec(order["script"], {"__name__": "__main__"})
    else:
        runpy.run_module("sglang.launch_server", run_name="__main__")


class _Children:
    """What the nursery has forked: when one ends, its exit status is written beside its log."""

    def __init__(self) -> None:
        self._logs: dict[int, Path] = {}
        signal.signal(signal.SIGCHLD, self._note_ends)

    def fork(self, log: Path) -> int:
        """Process id of the child; 0 in the child."""
        # One that ends at once is in the table by then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if child := os.fork():
            self._logs[child] = log
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return child

    def _note_ends(self, *_: Any) -> None:
        for pid in list(self._logs):
            # Another end may interrupt this function, which then has collected some of them already.
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    atomic_write_text(_status_path(self._logs.pop(pid)), str(os.waitstatus_to_exitcode(status)))


def _is_ours(client: socket.socket) -> bool:
    """Return whether it belongs to the same user: everybody on a machine sees such addresses."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _line(replies: IO[str]) -> str:
    """Return what a client sent; nothing of one that has gone, however it went."""
    try:
        return replies.readline()
    except ConnectionError:
        return ""


def _tell(client: socket.socket, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # the next reading tells that it has gone
        client.sendall(f"{text}\n".encode())


def _orders(listener: socket.socket) -> Generator[tuple[Any, dict[str, Any]]]:
    """What clients send, a line each, with their connections; until the last of them has gone."""
    clients: dict[Any, IO[str]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    if not _is_ours(client):
                        client.close()
                        continue
                    clients[client] = client.makefile()
                    selector.register(client, selectors.EVENT_READ)
                    _tell(client, "ready")
                elif line := _line(clients[key.fileobj]):
                    yield key.fileobj, json.loads(line)
                else:
                    selector.unregister(key.fileobj)
                    clients.pop(key.fileobj).close()
                    key.fileobj.close()
                    if not clients:
                        return
    finally:
        for opened in (selector, listener, *clients.values(), *clients):
            opened.close()


def _nurse(listener: socket.socket) -> None:
    for name in IMPORTS:
        __import__(name)
    children, orders = _Children(), _orders(listener)
    for client, order in orders:
        child = children.fork(Path(order["log"]))
        if child == 0:
            orders.close()
            _serve(order)
            return
        _tell(client, str(child))
    os._exit(0)  # to take so many modules down would take ten seconds


if __name__ == "__main__":
    _nurse(socket.socket(fileno=int(sys.argv[1])))
