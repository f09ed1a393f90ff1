"""Servers for the end-to-end tests: real SGLang processes on the golden pair, started once per configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TARGET, DRAFT = GOLDEN / "target", GOLDEN / "vanilla_g7"
DSPARK = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT))
FLOAT32 = ("--dtype", "float32")
MAX_SERVERS = 3  # a server is three processes of about 1 GB each

Launch = Callable[..., LaunchedServer]


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """``launch(*flags)`` gives a float32 server of the golden target; those used last stay up."""
    servers: dict[tuple[str, ...], LaunchedServer] = {}

    def get(*flags: str) -> LaunchedServer:
        server = servers.pop(flags, None)
        if server is None:
            if len(servers) == MAX_SERVERS:
                servers.pop(next(iter(servers))).stop()
            server = LaunchedServer(TARGET, *CPU_FLAGS, *FLOAT32, *flags, env=CPU_ENV)
            server.__enter__()
        servers[flags] = server
        return server

    try:
        yield get
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture
def plain(launch: Launch) -> LaunchedServer:
    """The target alone."""
    return launch()


@pytest.fixture
def dspark(launch: Launch) -> LaunchedServer:
    """DSPARK with its defaults, overlap scheduling on."""
    return launch(*DSPARK)


def generate(server: LaunchedServer, bodies: list[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    """Answers of ``POST /generate`` in order, ``concurrency`` requests at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: server.post_json("/generate", body), bodies))


def output_ids(server: LaunchedServer, bodies: list[dict[str, Any]], concurrency: int = 8) -> list[list[int]]:
    """Token ids of :func:`generate`."""
    return [answer["output_ids"] for answer in generate(server, bodies, concurrency)]


def greedy(input_ids: list[int], max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Body of a greedy request; the golden target stops at token 1."""
    parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop_token_ids": [1]}
    return {"input_ids": input_ids, "sampling_params": parameters, **fields}


def in_background(function: Callable[[], Any]) -> threading.Thread:
    """Start ``function`` in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
