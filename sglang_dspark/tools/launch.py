"""Runs an SGLang server as a child process, and talks to it: starts it, waits until it answers, and always stops it.

Used by the demo, the tests and the benchmarks. It knows the server from outside only (a command, a port, a log), so it
imports neither SGLang nor torch.

    with LaunchedServer(target_dir, *CPU_FLAGS, "--dtype", "float32", env=CPU_ENV) as server:
        server.get_json("/dspark/stats")

Requests go without a proxy, JSON both ways, and errors say what to do.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sglang_dspark.errors import ConfigError, DSparkError, LaunchError

open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""``urlopen`` past any proxy: one set for the outside world must not see requests to 127.0.0.1."""


def _answer(url: str, body: Any, timeout_s: float, api_key: str | None = None) -> bytes:
    """Return the answer to ``GET``, or to ``POST`` with ``body`` as JSON unless that is None."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if api_key is not None:
        # Not for whomever the server may redirect to.
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    with open_directly(request, timeout=timeout_s) as response:
        content: bytes = response.read()
    return content


@dataclass(frozen=True)
class JsonClient:
    """A server that a command line option names.

    Attributes:
        option: that option, for error messages.
        url: base URL, without a trailing slash.
        kind: what should be running there, for error messages.
        timeout_s: longest time for one answer.
        api_key: the server's ``--api-key``; None where it has none.
    """

    option: str
    url: str
    kind: str
    timeout_s: float
    api_key: str | None = None

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to ``GET path``, or to ``POST path`` with a body.

        Raises:
            ConfigError: the server does not answer, or not with JSON.
            DSparkError: the server answered with an error.
        """
        try:
            answer: dict[str, Any] = json.loads(_answer(self.url + path, body, self.timeout_s, self.api_key))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise DSparkError(f"{self.url}{path}: HTTP {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.option} {self.url}: {error}; check that {self.kind} server is running there"
            ) from error
        return answer


CPU_ENV: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
"""Environment that makes SGLang serve on a machine without a GPU, from local checkpoints."""

CPU_FLAGS = (
    *("--device", "cpu", "--disable-cuda-graph", "--mem-fraction-static", "0.3"),
    # An idle scheduler otherwise polls its sockets with a whole core.
    "--sleep-on-idle",
    # SGLang sizes the K/V pool from free memory; on a shared machine with a small model a fixed pool starts faster.
    *("--max-total-tokens", "16384", "--max-running-requests", "16"),
)
"""Flags for a small model on a CPU; add ``--dtype``."""

CUDA_MEMORY_FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", "16", "--mem-fraction-static", "0.3")
"""Flags for a small model on a part of a GPU, with the backends that SGLang chooses; add ``--dtype``."""

CUDA_FLAGS = (
    # A plain server then computes attention and draws tokens with the same backends as one with DSPARK.
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-prefill-cuda-graph"),
    *CUDA_MEMORY_FLAGS,
)
"""Flags for a small model on a part of a GPU, with backends that need no package besides SGLang; add ``--dtype``."""


PLUGIN = ("--speculative-algorithm", "DSPARK")
"""Flags that ask for this DSPARK; with ``SGLANG_DSPARK_ENGINE=builtin`` in the environment, for SGLang's own."""


def dspark_flags(draft_path: str | Path) -> tuple[str, ...]:
    """Return the flags that make a server decode with DSPARK."""
    return (*PLUGIN, "--speculative-draft-model-path", str(draft_path))


STARTUP_TIMEOUT_S = 600.0
_LAST_BREATH_S = 30.0
POLL_S = 0.25
TAIL_LINES = 25


class LaunchedServer:
    """``python -m sglang.launch_server`` on 127.0.0.1, as a context manager.

    Attributes:
        url: base URL, without a trailing slash.
        pid: process id of the server, which leads a process group of its own.
        log_path: everything the server printed; kept after the server has stopped.
        startup_s: seconds from the start of the process to the first healthy answer; 0 until then.
    """

    def __init__(
        self,
        model_path: str | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        """Describe the server; it starts when the ``with`` block is entered.

        Args:
            model_path: the target checkpoint.
            flags: further arguments of ``sglang.launch_server``. A ``--port`` among them is used, else a free one.
            env: variables set on top of this process's environment.
            log_path: where the server's output goes; default: a new file in the temporary directory.
            startup_timeout_s: how long the server may take until it answers, warm-up request included.
        """
        self._port = flags[flags.index("--port") + 1] if "--port" in flags else str(free_port())
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path), *flags]
        if "--port" not in flags:
            self._command += ["--port", self._port]
        if "--host" not in flags:
            self._command += ["--host", "127.0.0.1"]
        self._env = {**os.environ, **(env or {})}
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.log_path = Path(log_path) if log_path is not None else _new_log_path()
        self.startup_s = 0.0

    @property
    def pid(self) -> int:
        """Return the process id of the server, which has been started."""
        return self._started().pid

    @property
    def exit_status(self) -> int | None:
        """Return how the server's first process ended, as ``subprocess`` says it; None while it runs."""
        return self._started().poll()

    def __enter__(self) -> Self:
        """Start the server and wait until it is healthy.

        Raises:
            LaunchError: it died or took too long; the message ends with the tail of its log.
        """
        with self.log_path.open("wb") as log:
            self._process = self._start(log)
            self._reaper = _start_reaper(self._process.pid)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every process of its group. Does nothing when that has happened already."""
        process, reaper = self._process, self._reaper
        if process is None or reaper is None:
            return
        # Killed at once: SGLang drains for 5 s on SIGTERM and sits out SIGINT for more than 10 s. The group may outlive
        # its leader, as long as one scheduler or detokenizer is left in it.
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # A scheduler that was killed takes a while to give its GPU back, which the next server may need.
            deadline = time.monotonic() + _LAST_BREATH_S
            while _group_runs(process.pid) and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
        finally:
            reaper.kill()
            reaper.communicate()
            self._reaper = None  # the group's number may belong to others from now on

    def suspend(self) -> None:
        """Keep the server's processes off the CPU until :meth:`resume`; an idle scheduler may poll with a whole core.

        They go on where they were. SGLang's watchdog only counts while a batch runs, so suspend an idle server.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended server go on; does nothing to one that runs."""
        self._signal(signal.SIGCONT)

    def get_json(self, path: str) -> Any:
        """Return the decoded JSON answer to ``GET path``; ``urllib.error.HTTPError`` has the body of a refusal."""
        return json.loads(_answer(self.url + path, None, 60.0))

    def post(self, path: str, body: Any, *, timeout_s: float = 600.0) -> bytes:
        """Return the answer to ``POST path`` with a JSON body: a sentence, or nothing, of some routes."""
        return _answer(self.url + path, body, timeout_s)

    def post_json(self, path: str, body: Any) -> Any:
        """Return the decoded JSON answer to ``POST path``, as :meth:`post`."""
        return json.loads(self.post(path, body))

    def flush_cache(self) -> None:
        """Empty the radix cache, when the server is idle: under overlap one more step runs after the last answer."""
        self.post("/flush_cache?timeout=30", {}, timeout_s=60.0)

    def log_tail(self) -> str:
        """Return the last lines that the server printed."""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the next request tells that it has died
            os.killpg(self.pid, number)

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches only us, and the whole group can be stopped by its leader's id.
        return subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LaunchError("the server was not started; use it in a `with` statement")
        return self._process

    def _wait_until_healthy(self) -> None:
        process, start = self._started(), time.monotonic()
        while True:
            elapsed_s = time.monotonic() - start
            if process.poll() is not None:
                raise self._failure(f"ended with exit status {process.returncode} after {elapsed_s:.0f} s")
            if self._is_healthy():
                self.startup_s = time.monotonic() - start
                return
            if elapsed_s > self._startup_timeout_s:
                raise self._failure(f"did not answer within {self._startup_timeout_s:g} s")
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        # 503 until the warm-up request is done; then the answer takes a second, because it generates a token.
        try:
            with open_directly(self.url + "/health", timeout=30.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _failure(self, what: str) -> LaunchError:
        return LaunchError(f"the server {what}. {' '.join(self._command)}\nEnd of {self.log_path}:\n{self.log_tail()}")


def _start_reaper(group: int) -> subprocess.Popen[bytes]:
    """Start a process that kills the group when this process ends, however that happens.

    It waits for the end of its input, whose other end only this process holds. A parent-death signal would not do: it
    reaches the server, but not the scheduler and detokenizer that it is just starting.
    """
    code = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _group_runs(group: int) -> bool:
    """Return whether a process of the group is there that holds anything still, as far as ``/proc`` tells."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone by now
            # A process may have any name, cut in the middle of a letter.
            state, _parent, of_group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(of_group) == group and state not in "ZX":
                return True
    return False


_looks = itertools.count()


def free_port() -> int:
    """Return a port of 127.0.0.1 that is not in use.

    Raises:
        LaunchError: all are taken.
    """
    # Below the ports that systems hand out to outgoing connections: one of these may be taken in the half minute that a
    # server needs until it listens. For as long, this process looks at other ports, and so do others, whose ids are
    # close. SGLang derives further ports by adding 10000.
    for _ in range(5_000):
        port = 15_000 + (97 * os.getpid() + next(_looks)) % 5_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError("no free port between 15000 and 20000; pass --port")


def _new_log_path() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="sglang-", suffix=".log")
    os.close(descriptor)
    return Path(name)
