"""Measures how far tokens of a text lie below the best ones, as another server of the target has it."""

from __future__ import annotations

from collections.abc import Sequence

from golden_server import endless, generate

from sglang_dspark.tools.launch import LaunchedServer


def regrets(
    server: LaunchedServer, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return for every token of ``texts`` the logit of the best token at its place less its own.

    The server reads prompt and text as one prompt, so what it writes itself does not matter. After a near-tie two
    texts have nothing in common, but each of their tokens remains the best one, or nearly so, after those before it.
    """
    bodies = [
        endless([*prompt, *text], 1, return_logprob=True, logprob_start_len=len(prompt) - 1, top_logprobs_num=1)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    found = []
    for text, answer in zip(texts, generate(server, bodies, 1), strict=True):
        told = answer["meta_info"]
        own, best = (told[name][-len(text) :] for name in ("input_token_logprobs", "input_top_logprobs"))
        assert [token for _, token, _ in own] == list(text)
        found.append([most - one for (one, *_), ((most, *_),) in zip(own, best, strict=True)])
    return found
