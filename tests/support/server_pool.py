"""Starts the servers that tests ask for by name, and keeps a few of them.

They are forked from a process that has imported SGLang, which all processes of a test run share: three imports are most
of a server's start. What crosses from process to process is tested by servers that are started as users do.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import torch
from golden_server import INTERPRETED, LATE, RANDOM_LENGTHS, TARGET, TWO_RANKS, sitecustomized

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, CUDA_FLAGS, LaunchedServer

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


MAX_SERVERS = 4  # a server is three processes of 0.8 GB each, and two test processes may have so many
ON_GPU = torch.cuda.is_available()

# Prompts are encoded as soon as they fit, whatever their texts will take: a pool that is too small gets full.
_ADMISSION = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
# SGLang ends a server if others take more than this share of the machine's memory while its weights are loaded.
ROOMY_CPU_FLAGS = (*CPU_FLAGS, "--mem-fraction-static", "0.9")
_COMMON = {**({} if ON_GPU else CPU_ENV), **sitecustomized(RANDOM_LENGTHS), **_ADMISSION}
# Servers without emulated graphs run no kernel.
_IMPORTED = {**_COMMON, **INTERPRETED}
# Windows of recurrent layers have 16 bits whatever the model has, and a text that is encoded again differs by more than
# near-ties from one that was decoded.
WHOLE_WINDOWS = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# SGLang lacks some attention on a CPU, see ``literal_attention``.
LITERALLY = {} if ON_GPU else {"LITERAL_ATTENTION": "1"}
LITERAL_FLAGS = () if ON_GPU else ("--attention-backend", "intel_amx", "--moe-runner-backend", "triton")
# Not every model of transformers can be compiled as one is imported, and SGLang looks at all of them for Mistral 3.
NO_SCRIPTS = {"PYTORCH_JIT": "0"}
NO_SNAPSHOTS = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
"""What a plain server on a CPU needs for recurrent states; DSPARK decides the same by itself."""

HOST_MEMORY = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "8"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
)
"""Has prefixes move to host memory, of which there is more than of the device's."""
EIGHT_BITS = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU of compute capability 8.9: SGLang's eight-bit caches on a CPU are for a backend of its own",
)
"""Mark of tests whose target has weights or a K/V cache of eight-bit floats."""


Flags = Sequence[str | Path]


@dataclass(frozen=True)
class Recipe:
    """Flags, environment and model of a server.

    Attributes:
        flags: its flags, several to a string, and functions that return more of them, given an empty folder for the
            files that they name.
        env: variables on top of those that every server has.
        model: gives the target's folder, likewise.
        forked: its processes are forked from one that has imported SGLang. Servers without show that no process needs
            what another one has left behind.
    """

    flags: Sequence[str | Path | Callable[[Path], Flags]] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Callable[[Path], Path] = lambda folder: TARGET
    forked: bool = True

    def words(self, folder: Path) -> Iterator[str]:
        """Yield its flags."""
        for flag in self.flags:
            if callable(flag):
                yield from map(str, flag(folder))
            else:
                yield from flag.split() if isinstance(flag, str) and flag.startswith("--") else [str(flag)]


def prepare_servers() -> None:
    """Let SGLang be imported for most of the servers of this test run."""
    if not ON_GPU:
        start_nursery(_IMPORTED)


def run_script(script: str, argument: Any, env: Mapping[str, str], log: Path) -> str:
    """Return what a script prints, into ``log``, in a process of its own, which has to end well.

    Args:
        argument: what it finds in ``sys.argv[1]``, as JSON.
        env: variables on top of those of this process.
    """
    env, text = {**os.environ, **env}, json.dumps(argument)
    log.write_text("")
    if ON_GPU:
        with log.open("w") as file:
            command = [sys.executable, "-c", script, text]
            status = subprocess.run(command, check=False, env=env, stdout=file, stderr=file).returncode
    else:
        imported = {**_IMPORTED, **{name: env[name] for name in env.keys() & NO_SCRIPTS.keys()}}
        status = Forked(imported, [text], env, log, script).wait()
    printed = log.read_text()
    assert status == 0, printed[-4000:]
    return printed


class ServerPool:
    """Starts servers when they are asked for, float32, on a GPU if there is one; ``most`` stay up, ``plain`` always."""

    def __init__(self, recipes: Mapping[str, Recipe], folder: Path, most: int = MAX_SERVERS) -> None:
        self._recipes, self._folder, self._most = recipes, folder, most
        # One for all processes of a test run.
        self._home = folder.parents["PYTEST_XDIST_WORKER" in os.environ] / "home"
        self._servers: dict[str, LaunchedServer] = {}

    def get(self, name: str) -> LaunchedServer:
        """Return the server of this recipe; another one if a test has ended it."""
        server = self._servers.pop(name, None)
        if server is not None and server.exit_status is not None:
            server.stop()
            server = None
        if server is None:
            if len(self._servers) == self._most:
                self._servers.pop(next(name for name in self._servers if name != "plain")).stop()
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            server = self._started(self._recipes[name], folder)
        self._servers[name] = server
        return server

    @contextmanager
    def lent(self, recipe: Recipe, folder: Path) -> Iterator[LaunchedServer]:
        """Yield a server that no other test asks for, in an empty folder; it ends with the ``with`` block."""
        server = self._started(recipe, folder)
        try:
            yield server
        finally:
            server.stop()

    def printed_by(self, script: str, argument: Any, **env: str) -> list[Any]:
        """Return the JSON strings that a script prints, one to a line, in a process of its own on a CPU.

        Args:
            argument: what it finds in ``sys.argv[1]``, as JSON.
            env: more variables of the process.
        """
        printed = run_script(script, argument, {**CPU_ENV, **env}, self._folder / "script.log")
        return [json.loads(line) for line in printed.splitlines() if line.startswith('"')]

    def close(self) -> None:
        """Stop them all."""
        for server in self._servers.values():
            server.stop()

    def _started(self, recipe: Recipe, folder: Path) -> LaunchedServer:
        flags = [*(CUDA_FLAGS if ON_GPU else ROOMY_CPU_FLAGS), "--dtype", "float32", *recipe.words(folder)]
        # Servers of one shape share their step times, but not with this machine's user.
        env = {**_COMMON, "HF_HUB_OFFLINE": "1", "HOME": str(self._home), **recipe.env}
        # A process that has touched a GPU cannot be forked.
        if recipe.forked and not ON_GPU:
            # The warm-up request has been answered by then: asking for another token would take a second.
            env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
            # SGLang would compile masks of grammars, sampling by seeds, penalties and more for half a minute each.
            env["TORCH_COMPILE_DISABLE"] = "1"
            # Some do not change what is imported.
            late = {*TWO_RANKS, *WHOLE_WINDOWS, *LATE}
            imported = {**_IMPORTED, **{name: recipe.env[name] for name in recipe.env.keys() - late}}
            server: LaunchedServer = ForkedServer(imported, recipe.model(folder), *flags, env=env)
        else:
            server = LaunchedServer(recipe.model(folder), *flags, env=env)
        server.__enter__()
        return server
