"""A server of the golden pair on a GPU, with CUDA graphs and overlap scheduling."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import save_byte_tokenizer
from golden_server import DSPARK, TARGET, sitecustomized

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

WATCHED = Path(__file__).parent / "watched"


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[LaunchedServer]:
    """Serves in bfloat16: SGLang's kernels for CUDA have no float32 form. Letters are tokens, as grammars need."""
    letters = ("--tokenizer-path", str(save_byte_tokenizer(tmp_path_factory.mktemp("letters"))))
    env = {"HF_HUB_OFFLINE": "1", **sitecustomized(WATCHED)}
    more = ("--dtype", "bfloat16", "--max-running-requests", "64", "--cuda-graph-max-bs-decode", "16")
    with LaunchedServer(TARGET, *CUDA_FLAGS, *more, *letters, *DSPARK, env=env) as server:
        yield server
