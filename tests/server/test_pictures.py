"""Prompts with pictures on a real server: texts are those of transformers, whose processor and weights it has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from family_targets import (
    PICTURE_PROMPTS,
    behind_pictures,
    continued_after_pictures,
    data_url,
    picture_target,
    place,
    write_picture_target,
)
from golden_server import assert_pool_is_whole, call, counting, generate, policy, refused, together
from server_pool import Recipe

from sglang_dspark.tools.launch import PLUGIN

NUM_TOKENS, MANY_TOKENS = 20, 60


@cache
def read_by_transformers(architecture: str, num_tokens: int) -> list[list[int]]:
    """Return the greedy continuations of ``PICTURE_PROMPTS``."""
    with TemporaryDirectory() as folder:
        model, processor = write_picture_target(architecture, Path(folder))
    return [
        continued_after_pictures(model, processor, text.replace("PICTURE", place(architecture)), images, num_tokens)
        for text, images in PICTURE_PROMPTS
    ]


def architecture_of(server) -> str:
    folder = Path(server.get_json("/get_model_info")["model_path"])
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def bodies_of(server, num_tokens=NUM_TOKENS, **fields):
    return behind_pictures(architecture_of(server), num_tokens, **fields)


def assert_texts(answers, expected):
    assert [answer["output_ids"] for answer in answers] == expected


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("pictures", "random"),
        pytest.param("qwen2_5_vl", "auto", marks=pytest.mark.thorough),  # emulated servers know no policy of the tests
        pytest.param("gemma4_pictures", "random", marks=pytest.mark.thorough),
        pytest.param("hybrid_pictures", "random", marks=pytest.mark.thorough),
    ],
)
def test_texts_after_pictures(request, name, then):
    """One by one, then from the cache and together, under ``static`` and under another policy.

    Prompts come in chunks that end within pictures; steps are replayed; K/V is in two pools; states are recurrent.
    """
    server = request.getfixturevalue(name)
    expected, bodies = read_by_transformers(architecture_of(server), NUM_TOKENS), bodies_of(server)
    assert expected[0] != expected[3]  # of which only the pictures differ
    with policy(server, "static"):
        assert_texts(generate(server, bodies, 1), expected)
    with policy(server, then):
        again = generate(server, bodies * 3, 4)
    assert_texts(again, expected * 3)
    for answer in again if name != "hybrid_pictures" else ():  # a cache of states has few prefixes of a prompt
        assert answer["meta_info"]["cached_tokens"] >= answer["meta_info"]["prompt_tokens"] - 1
    assert_pool_is_whole(server)


def test_retracted_requests_are_read_again(pictures):
    expected = read_by_transformers(architecture_of(pictures), MANY_TOKENS)
    answers = together(pictures, bodies_of(pictures, MANY_TOKENS) * 4)
    assert_texts(answers, expected * 4)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_whole(pictures)


def test_presets_and_logprobs_of_prompts_with_pictures(pictures):
    """Whose tokens in the place of pictures have ids that no vocabulary has."""
    expected = read_by_transformers(architecture_of(pictures), NUM_TOKENS)
    copying = {"speculation": {"preset": "summarization", "min_ngram": 1, "max_ngram": 2}}
    assert_texts(generate(pictures, bodies_of(pictures, **copying), 4), expected)
    answers = generate(pictures, bodies_of(pictures, return_logprob=True, logprob_start_len=0), 4)
    assert_texts(answers, expected)
    for answer in answers:
        assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]


def test_a_chat_with_a_picture(pictures):
    """The picture is sent as OpenAI's clients do; the chat template puts it into its place."""
    url, same = data_url(PICTURE_PROMPTS[0][1][0]), bodies_of(pictures)[0]
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
    parameters = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"model": "any", "messages": [{"role": "user", "content": content}], **parameters}
    answer = pictures.post_json("/v1/chat/completions", body)
    text = f"u:{place(architecture_of(pictures))}what is it;a:"
    assert answer["choices"][0]["message"]["content"] == pictures.post_json("/generate", same | {"text": text})["text"]
    assert "does not serve video_data yet" in refused(pictures, "/generate", {"text": "x", "video_data": ["x.mp4"]})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_turn_that_is_refused_with_its_pictures(pictures, streaming):
    expected = read_by_transformers(architecture_of(pictures), NUM_TOKENS)
    session = pictures.post_json("/open_session", {"capacity_of_str_len": 1000, "streaming": streaming})
    for wrong in ({"rid": "unknown"}, {"rid": "unknown", "replace": True}, {"rid": "unknown", "offset": 2}):
        body = bodies_of(pictures, session_params={"id": session, **wrong})[0]
        status, text = call(pictures, "/generate", body=body)
        assert status == (200 if streaming and len(wrong) == 1 else 400), text
    assert_texts(generate(pictures, bodies_of(pictures), 4), expected)
    assert call(pictures, "/close_session", body={"session_id": session})[0] == 200


@pytest.mark.thorough
def test_pictures_without_a_drafter(server_pool, tmp_path):
    """The placeholder of a picture is never copied: it is no token of the model.

    A bias has the answer say the mark after which the pictures of the prompt begin.
    """
    architecture = "Qwen3VLForConditionalGeneration"
    recipe = Recipe(
        (*PLUGIN, "--speculative-dspark-draft-free"),
        model=lambda folder: picture_target(architecture, folder / "target"),
    )
    with server_pool.lent(recipe, tmp_path) as server:
        bodies = bodies_of(server, speculation={"preset": "summarization", "min_ngram": 1})
        with counting(server) as counts:
            assert_texts(generate(server, bodies, 4), read_by_transformers(architecture, NUM_TOKENS))
        assert counts["copied_tokens"] > 0
        mark = place(architecture).partition("<|image_pad|>")[0]
        [begin] = server.post_json("/tokenize", {"model": "m", "prompt": mark, "add_special_tokens": False})["tokens"]
        for body in bodies:
            body["sampling_params"] = body["sampling_params"] | {"logit_bias": {str(begin): 100.0}}
        assert_texts(generate(server, bodies, 4), [[begin] * NUM_TOKENS] * len(bodies))
        assert_pool_is_whole(server)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mistral3", "gemma4_12b_pictures"])
def test_texts_after_pictures_are_those_of_the_plain_server(request, name):
    """For families of which SGLang reads some pictures otherwise than transformers.

    Positions of Mistral 3 have one coordinate. Gemma 4 12B has no encoder; tokens of a picture see one another in
    transformers, and in SGLang only where it attends with Triton.
    """
    server, plain = map(request.getfixturevalue, (name, f"plain_{name}"))
    bodies = bodies_of(server)
    expected = [answer["output_ids"] for answer in generate(plain, bodies, 1)]
    assert expected[0] != expected[3]
    with policy(server, "static"):
        assert_texts(generate(server, bodies, 1), expected)
    with policy(server, "random"):
        assert_texts(generate(server, bodies * 3, 4), expected * 3)
