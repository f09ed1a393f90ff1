"""Servers of the golden pair on a GPU, with CUDA graphs and overlap scheduling."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_server import DSPARK, TARGET, sitecustomized
from letter_tokenizers import save_byte_tokenizer

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

HERE = Path(__file__).parent


def served(changed: str, folder: Path) -> LaunchedServer:
    """Serve in bfloat16: SGLang's kernels for CUDA have no float32 form. Letters are tokens, as grammars need.

    Args:
        changed: folder next to this file whose ``sitecustomize`` changes the server.
    """
    letters = ("--tokenizer-path", str(save_byte_tokenizer(folder)))
    env = {"HF_HUB_OFFLINE": "1", **sitecustomized(HERE / changed)}
    more = ("--dtype", "bfloat16", "--max-running-requests", "64", "--cuda-graph-max-bs-decode", "16")
    return LaunchedServer(TARGET, *CUDA_FLAGS, *more, *letters, *DSPARK, env=env)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[LaunchedServer]:
    """Logs what waits for the device."""
    with served("watched", tmp_path_factory.mktemp("letters")) as server:
        yield server


@pytest.fixture(scope="session")
def delayed(tmp_path_factory) -> Iterator[LaunchedServer]:
    """The same server, whose streams fall behind each other."""
    with served("delayed", tmp_path_factory.mktemp("letters")) as server:
        yield server
