"""Servers for the end-to-end tests: real SGLang processes on the golden pair."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from golden_server import DSPARK, RANDOM_LENGTHS, TARGET, Launch, sitecustomized

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, CUDA_FLAGS, LaunchedServer

MAX_SERVERS = 3  # a server is three processes of 0.8 GB each, and two test processes may have so many
FLAGS, ENV = (CUDA_FLAGS, {"HF_HUB_OFFLINE": "1"}) if torch.cuda.is_available() else (CPU_FLAGS, CPU_ENV)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """``launch(*flags)`` gives a float32 server of the golden target, on a GPU if there is one; the last stay up.

    These servers know one more policy, ``random``, see ``random_lengths``.
    """
    tables = tmp_path_factory.mktemp("sps")
    servers: dict[tuple[str, ...], LaunchedServer] = {}

    def get(*flags: str) -> LaunchedServer:
        server = servers.pop(flags, None)
        if server is None:
            if len(servers) == MAX_SERVERS:
                servers.pop(next(iter(servers))).stop()
            # Step times are measured in a second here; they shall not end up in the user's cache.
            table = tables / f"{hashlib.sha256(repr(flags).encode()).hexdigest()[:16]}.json"
            env = {**ENV, **sitecustomized(RANDOM_LENGTHS), "SGLANG_DSPARK_SPS_TABLE_PATH": str(table)}
            server = LaunchedServer(TARGET, *FLAGS, "--dtype", "float32", *flags, env=env)
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
