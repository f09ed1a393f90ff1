"""The golden pair behind a real server: paths, flags, and requests to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_dspark.launch import LaunchedServer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TARGET, DRAFT = GOLDEN / "target", GOLDEN / "vanilla_g7"
DSPARK = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT))

GUARDED = (
    *DSPARK,
    "--enable-metrics",
    "--chat-template",
    "chatml",
    "--api-key",
    "user-key",
    "--admin-api-key",
    "admin-key",
)
"""A server with metrics, an API key, an admin key, and an idea of what a chat is."""

Launch = Callable[..., LaunchedServer]
"""``launch(*flags)`` of the fixture: a float32 server of the golden target with these flags."""


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


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"enabled": False},
    {"max_verify": 1},
    {"max_verify": 3, "trace": True},
    {"confidence_threshold": 0.8},
    {"preset": "summarization"},
    {"preset": "summarization", "min_ngram": 1, "max_ngram": 2, "max_draft": 2, "max_verify": 5},
    {"preset": "summarization", "min_ngram": 1, "confidence_threshold": 0.9},
    {"preset": "classification", "candidates": ["red stone . the large", "large stone finds the small", "blue"]},
)
"""Values of the field ``speculation``, one of every kind."""


def with_options(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests with these options in turn."""
    return [{**body, "speculation": OPTIONS[i % len(OPTIONS)]} for i, body in enumerate(bodies)]


@contextmanager
def policy(server: LaunchedServer, name: str, **fields: Any) -> Iterator[None]:
    """Verify by this policy inside the block; by ``auto`` again after it."""
    assert server.post_json("/dspark/policy", {"policy": name, **fields})["policy"] == name
    try:
        yield
    finally:
        server.post_json("/dspark/policy", {"policy": "auto"})


def in_background(function: Callable[[], Any]) -> threading.Thread:
    """Start ``function`` in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
