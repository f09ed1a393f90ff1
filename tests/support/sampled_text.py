"""Short sampled texts of the golden target, many of them, to be tested against their distribution."""

from __future__ import annotations

from typing import Any

from golden_server import CASES, generate

from sglang_dspark.tools.launch import LaunchedServer

ALPHA = 1e-4
PROMPT = CASES[2]["prompt_ids"]
DEPTH = 4  # the first token comes from prefill, the others from a block
# The golden pair is confident and agrees with itself: hot enough that drafts and target differ at every position.
HOT = 2.0


def sample(
    server: LaunchedServer, parameters: dict[str, Any], num: int, depth: int = DEPTH, **fields: Any
) -> list[tuple[int, ...]]:
    """``num`` independent continuations of PROMPT by ``depth`` tokens."""
    group = 64
    body = {
        "input_ids": PROMPT,
        "sampling_params": {**parameters, "max_new_tokens": depth, "n": group, "ignore_eos": True},
        **fields,
    }
    answers = generate(server, [body] * (num // group), 4)
    return [tuple(choice["output_ids"]) for answer in answers for choice in answer]
