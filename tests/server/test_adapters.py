"""LoRA adapters of the target on requests: each gets the text of a plain server, whatever else is in its batch."""

from __future__ import annotations

from typing import Any

import pytest
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    assert_nothing_was_awaited,
    assert_retracted_unnoticed,
    endless,
    generate,
    greedy,
    mixed_bodies,
    outcomes_of,
    output_ids,
    policy,
    prompts,
)
from quantised_target import RANKS, written_adapter

NAMES = [*RANKS, None]


def with_adapters(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests with these adapters in turn, and every fifth without one."""
    return [body | {"lora_path": NAMES[i % len(NAMES)]} for i, body in enumerate(bodies)]


def test_one_batch_of_several_adapters(adapters, plain_adapters):
    """Three and none, side by side in one body; every one of them writes something else."""
    prompt, names = CASES[1]["prompt_ids"], ["red", "green", "blue", None]
    expected = output_ids(plain_adapters, [greedy(prompt, 40, lora_path=name) for name in names], 1)
    assert len(set(map(tuple, expected))) == len(names)
    together = {**greedy(prompt, 40), "input_ids": [prompt] * len(names), "lora_path": names}
    for name in ("random", "off"):
        with policy(adapters, name):
            answers = adapters.post_json("/generate", together)
            assert [answer["output_ids"] for answer in answers] == expected


def test_an_adapter_in_the_name_of_the_model(adapters, plain_adapters):
    asked = {"prompt": CASES[1]["prompt_ids"], "max_tokens": 24, "temperature": 0}

    def texts(server):
        bodies = [asked | {"model": f"base{name}"} for name in ("", ":red", ":green")]
        return [server.post_json("/v1/completions", body)["choices"][0]["text"] for body in bodies]

    expected = texts(plain_adapters)
    assert len(set(expected)) == 3
    assert texts(adapters) == expected


def test_text_equals_the_target_alone(adapters, plain_adapters):
    """More adapters than the server holds at a time, with prompts among decode steps and all kinds of lengths."""
    bodies = with_adapters(mixed_bodies(16, seed=31))
    expected = output_ids(plain_adapters, bodies)
    with policy(adapters, "random"):
        assert output_ids(adapters, bodies[:4], 1) == expected[:4]
        assert output_ids(adapters, bodies, 16) == expected


def test_a_cached_prompt_is_that_of_its_adapter(adapters):
    """SGLang caches prompts by adapter; draft K/V lies at the same slots, so each finds its own again."""
    prompt = CASES[1]["prompt_ids"] * 3
    adapters.flush_cache()
    seen = {}
    with policy(adapters, "static"):
        for name in ("red", "green", "red", "green"):
            [answer] = generate(adapters, [greedy(prompt, 40, lora_path=name, speculation=DRAFTER_ALONE)], 1)
            info = answer["meta_info"]
            told = answer["output_ids"], outcomes_of(answer)
            assert info["cached_tokens"] >= len(prompt) - 1 if name in seen else info["cached_tokens"] == 0
            assert seen.setdefault(name, told) == told
    assert seen["red"] != seen["green"]


def test_an_adapter_that_is_loaded_and_unloaded_while_serving(adapters, plain_adapters, tmp_path):
    path = written_adapter(tmp_path / "late", 8, seed=9)
    texts = []
    for server in (plain_adapters, adapters):
        assert server.post_json("/load_lora_adapter", {"lora_name": "late", "lora_path": str(path)})["success"]
        texts.append(output_ids(server, [greedy(CASES[2]["prompt_ids"], 30, lora_path="late")], 1))
        assert server.post_json("/unload_lora_adapter", {"lora_name": "late"})["success"]
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_retracted_requests_keep_their_adapters(adapters, plain_adapters):
    """They come back to a batch of other requests, with a second prefill of prompt and text."""
    names = list(RANKS)
    bodies = [
        endless(prompt[:60], 100, lora_path=names[i % len(names)]) for i, prompt in enumerate(prompts(16, seed=9))
    ]
    expected = output_ids(plain_adapters, bodies, 16)
    with policy(adapters, "random"):
        assert_retracted_unnoticed(adapters, bodies, expected)


@pytest.mark.thorough
def test_two_ranks(parallel_adapters, plain_adapters):
    """Each adds its share of every adapter; only rank 0 knows which requests share a step with which."""
    bodies = with_adapters(mixed_bodies(15, seed=33))
    expected = output_ids(plain_adapters, bodies)
    for name in ("random", "static", "off"):
        with policy(parallel_adapters, name):
            assert output_ids(parallel_adapters, bodies, 4) == expected


@pytest.mark.thorough
def test_steps_that_are_replayed(adapter_graphs, plain_adapters):
    """Staged as on a GPU, by SGLang's kernels for one: adapters change places between replays of the same graph."""
    bodies = with_adapters([greedy(CASES[0]["prompt_ids"], 4)] * len(NAMES))
    expected = output_ids(plain_adapters, bodies)
    with policy(adapter_graphs, "static"):
        assert output_ids(adapter_graphs, bodies, 2) == expected
    with policy(adapter_graphs, "off"):
        assert output_ids(adapter_graphs, bodies[:2], 2) == expected[:2]
    assert "CUDA graphs for up to 2 requests" in assert_nothing_was_awaited(adapter_graphs)
