"""Drafts that are always right: what the server itself has answered before.

An oracle tells what the engine can do from what the drafter can: it costs what the drafter costs, and its drafts are
accepted, but for the first of a text that repeats itself, and for near-ties in 16 bits, where another batch may choose
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.client import CHAT_PATH, Sampling, request_body
from serving.configurations import Configuration
from serving.prompts import Prompt
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.launch import LaunchedServer


def check_oracle(configuration: Configuration, sampling: Sampling) -> None:
    """Refuse what cannot be recorded.

    Raises:
        ConfigError: answers are sampled, or not chats, of which alone SGLang returns the tokens.
    """
    if configuration.is_oracle and (sampling.temperature > 0 or sampling.raw):
        raise ConfigError(
            f"--config {configuration.label} replays greedy answers of chats; leave out --temperature and --raw-prompts"
        )


def recorded_drafts(
    server: LaunchedServer, configuration: Configuration, prompts: Sequence[Prompt], sampling: Sampling, users: int
) -> dict[int, dict[str, Any]]:
    """Have the server answer without drafts, so many prompts at a time, and return the field ``speculation`` of each.

    Returns:
        By the index of the prompt; see docs/presets.md.
    """
    asked = {"stream": False, "stream_options": None, "return_output_ids_in_sglext": True}

    def ask(prompt: Prompt) -> dict[str, Any]:
        body = request_body(prompt, sampling, {"enabled": False}) | asked
        [recorded] = server.post_json(CHAT_PATH, body)["sglext"]["output_ids"]
        return {"preset": "replay", "recorded": recorded}

    with ThreadPoolExecutor(users) as pool:
        return dict(zip((prompt.index for prompt in prompts), pool.map(ask, prompts), strict=True))
