"""All servers of a sweep: started once, and only the one under test runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from serving.client import ReplyError
from sglang_dspark.errors import LaunchError
from sglang_dspark.tools.launch import LaunchedServer


class Fleet:
    """Context manager over the servers of a sweep, by label.

    An idle SGLang scheduler polls without pause, unless told ``--sleep-on-idle``, and takes up to a core from the
    server that is being measured. So every server but that one is suspended (SIGSTOP to its process group) and uses no
    CPU time at all. It resumes where it was; SGLang's watchdog only counts while a batch is running, and there is none
    between rounds.

    Attributes:
        failed: why servers did not start that the fleet does without, by label.
    """

    def __init__(
        self,
        servers: Mapping[str, LaunchedServer],
        on_start: Callable[[str], None] = lambda label: None,
        *,
        together: bool = False,
    ) -> None:
        """Describe the fleet; the servers start when the ``with`` block is entered.

        Args:
            servers: servers that were not started yet, by label; several labels may share one.
            on_start: called with the (first) label before each start.
            together: start all at the same time, and do without those that fail; else one after the other.
        """
        self._servers = servers
        self._on_start = on_start
        self._together = together
        self._stack = ExitStack()
        self.failed: dict[str, LaunchError] = {}

    def __enter__(self) -> Self:
        """Start all servers.

        Raises:
            LaunchError: one of them did not start, or none of those that start together; the others are stopped.
        """
        first = {id(server): label for label, server in reversed(self._servers.items())}
        labels = [label for label, server in self._servers.items() if first[id(server)] == label]
        with ExitStack() as stack:
            if self._together:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(lambda label: self._try_to_start(label, stack), labels))
            else:
                for label in labels:
                    self._start(label, stack)
            if self.failed and len(self.failed) == len(self._servers):
                raise next(iter(self.failed.values()))
            self._stack = stack.pop_all()
        return self

    def _try_to_start(self, label: str, stack: ExitStack) -> None:
        try:
            self._start(label, stack)
        except LaunchError as error:
            server = self._servers[label]
            self.failed |= {of: error for of, other in self._servers.items() if other is server}

    def _start(self, label: str, stack: ExitStack) -> None:
        self._on_start(label)
        server = self._servers[label]
        server.__enter__()
        stack.push(server)
        # A suspended process cannot act on a signal that asks it to end.
        stack.callback(server.resume)
        server.suspend()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def awake(self, label: str) -> Iterator[LaunchedServer]:
        """Let one server run for the duration of the ``with`` block.

        Raises:
            LaunchError: the server failed or has died; the message ends with the tail of its log.
        """
        server = self._servers[label]
        server.resume()
        try:
            yield server
        except (ReplyError, OSError) as error:
            raise LaunchError(f"{label}: {error}\nEnd of {server.log_path}:\n{server.log_tail()}") from error
        finally:
            server.suspend()
