"""Tests of memory that is given away while requests come, and of a pool that is too small for them.

One target keeps recurrent states, and its steps are replayed: see ``hybrid_graphs``.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from family_targets import COMMON, continued, write_target
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    PACE_MS,
    VOCAB,
    assert_cut_at_the_limit,
    assert_nothing_was_awaited,
    assert_pool_is_whole,
    beginning_alike,
    call,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    last_answer,
    outcomes_of,
    output_ids,
    policy,
    prompts,
    refused,
    states_of,
    together,
    wait_for_running,
    while_running,
    with_options,
)

PROMPTS = [case["prompt_ids"] for case in CASES[:3]]


def rounds(answers):
    """Return the texts, and what was drafted for them and accepted."""
    return [(answer["output_ids"], outcomes_of(answer)) for answer in answers]


def asleep(server, asked, *steps):
    """Return the answers to requests that come while memory is away: they come after the last of these steps."""
    answers = []
    came = threading.Thread(target=lambda: answers.extend(generate(server, asked, 4)))
    came.start()
    for path, body in steps:
        time.sleep(0.3)
        assert answers == []
        assert call(server, path, body=body)[0] == 200
    came.join()
    return answers


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("dspark", 20),
        pytest.param("saving", 20, marks=pytest.mark.thorough),
        pytest.param("graphs_saving", 5, marks=pytest.mark.thorough),
    ],
)
def test_a_server_sleeps_and_wakes(request, name, tokens):
    """Nothing is given away without ``--enable-memory-saver``; a plain server would answer all the while.

    Where it is, eager and captured steps find weights and K/V that were overwritten, all but what the host keeps. The
    drafter's weights are random there: those of a file are no allocation on a CPU.
    """
    server = request.getfixturevalue(name)
    asked = [endless(prompt, tokens, speculation=DRAFTER_ALONE) for prompt in PROMPTS]
    with policy(server, "static"):
        before = rounds(generate(server, asked, 3))
        assert call(server, "/release_memory_occupation", body={"tags": ["kv_cache", "weights"]})[0] == 200
        assert call(server, "/release_memory_occupation", body={})[0] == 200  # what is left
        answers = asleep(
            server,
            asked,
            ("/resume_memory_occupation", {"tags": ["weights"]}),
            ("/continue_generation", {}),
            ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
        )
    assert rounds(answers) == before
    assert call(server, "/resume_memory_occupation", body={})[0] == 200  # nothing is away


def test_running_requests_keep_the_memory(dspark):
    """A plain server would end, and also over the tag."""
    with policy(dspark, "off", pace_ms=PACE_MS), while_running(dspark, endless([5, 6, 7], 900)):
        assert "requests are running" in refused(dspark, "/release_memory_occupation", {})
    for path in ("release", "resume"):
        said = refused(dspark, f"/{path}_memory_occupation", {"tags": ["hope"]})
        assert "tags=['hope']" in said and "kv_cache, weights, cuda_graph" in said


def test_memory_is_released_right_after_requests(dspark):
    """Requests that were aborted end in the step that is under way."""
    with policy(dspark, "static", pace_ms=PACE_MS):
        for _ in range(4):
            answers = []
            running = in_background(lambda into=answers: into.extend(generate(dspark, [endless([5, 6, 7], 900)], 1)))
            wait_for_running(dspark, 1)
            call(dspark, "/abort_request", body={"abort_all": True})
            assert call(dspark, "/release_memory_occupation", body={})[0] == 200
            assert call(dspark, "/resume_memory_occupation", body={})[0] == 200
            running.join()
            assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


NUM_TOKENS = 6  # an interpreted step takes a tenth of a second


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of transformers."""
    return write_target("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("target"))


def random_prompts(*lengths, seed=3):
    draw = random.Random(seed)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in lengths]


def texts_of(model, bodies):
    """Return what transformers writes."""
    lengths = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    return [continued(model, body["input_ids"], num)[-num:] for body, num in zip(bodies, lengths, strict=True)]


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["static", "off"])
@pytest.mark.slow
@pytest.mark.thorough
def test_texts(hybrid_graphs, model, name, fields):
    """One graph writes the text; so do two with the commit launched after them. Three requests are launched."""
    bodies = [endless(prompt, NUM_TOKENS - i, **fields) for i, prompt in enumerate(random_prompts(2, 17, 30, seed=11))]
    with policy(hybrid_graphs, name), counting(hybrid_graphs) as grown:
        for concurrency in (2, 3):
            assert output_ids(hybrid_graphs, bodies, concurrency) == texts_of(model, bodies)
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 20 or name == "off"


@pytest.mark.slow
@pytest.mark.thorough
def test_turns_begin_at_a_state_that_a_replay_has_stored(hybrid_graphs, model):
    """Steps are replayed as one graph or as two."""
    for fields, prompt in zip(({}, {"return_logprob": True}), random_prompts(60, 58), strict=True):
        with policy(hybrid_graphs, "static"):
            [answer] = output_ids(hybrid_graphs, [endless(prompt, 7, **fields)], 1)
            turn = endless([*prompt, *answer, 17], 3)
            [found] = generate(hybrid_graphs, [turn], 1)
        assert ([found["output_ids"]], found["meta_info"]["cached_tokens"]) == (texts_of(model, [turn]), 64)


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_is_read_back_or_compiled(hybrid_graphs):
    """The log covers the tests above."""
    assert "forms of kernels compiled at start-up" in assert_nothing_was_awaited(hybrid_graphs)


@pytest.mark.slow
@pytest.mark.thorough
def test_turns_begin_at_a_state_from_the_middle(hybrid_overlap, model):
    """At multiples of 64 tokens, of prompts and of what was written, wherever the text ended."""
    asked = random_prompts(50, 61, 70, 110)
    texts = [continued(model, prompt, 26) for prompt in asked]
    with policy(hybrid_overlap, "static"):
        for cut in (2, 3, 4, 5, 11, 14, 15, 18, 25):
            hybrid_overlap.flush_cache()
            ends = [text[len(prompt) + cut - 1] for prompt, text in zip(asked, texts, strict=True)]
            first = [greedy(prompt, 30, {"stop_token_ids": [end]}) for prompt, end in zip(asked, ends, strict=True)]
            answers = output_ids(hybrid_overlap, first, 4)
            turns = [endless([*prompt, *text, 17, 23], 6) for prompt, text in zip(asked, answers, strict=True)]
            found = generate(hybrid_overlap, turns, 1)
            assert [answer["output_ids"] for answer in found] == texts_of(model, turns)
            # The last token of an answer has not been read yet.
            kept = [(len(turn["input_ids"]) - 3) // 64 * 64 for turn in turns]
            assert [answer["meta_info"]["cached_tokens"] for answer in found] == kept


@pytest.mark.slow
@pytest.mark.thorough
def test_retraction(hybrid_overlap, model):
    """States are made again from what the cache still has, and next to no draft of a random drafter is right."""
    bodies = beginning_alike(10, 60)
    with policy(hybrid_overlap, "random"), counting(hybrid_overlap) as grown:
        answers = generate(hybrid_overlap, bodies, 10)
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == texts_of(model, bodies)
    assert_pool_is_whole(hybrid_overlap)


def test_retraction_and_context_limit(tight, plain):
    """A pool that cannot hold the running requests, and requests that grow into the context limit.

    With a block of 7 a step reserves 16 slots past the committed length, rows of req_to_token have room for 12 by
    default: without more headroom the neighbour's first slots would be overwritten.
    """
    rng = random.Random(3)
    bodies = [
        {
            "input_ids": rng.choices(VOCAB, k=k),
            "sampling_params": {"temperature": 0, "max_new_tokens": n},
        }
        for k, n in [(4, 123)] * 6 + [(90, 37), (100, 27), (120, 7), (110, 17), (60, 67), (30, 97), (119, 8)] * 2
    ]
    expected, beside = output_ids(plain, bodies, 20), tight.get_json("/dspark/stats")["prompts"]["beside"]
    with policy(tight, "random", pace_ms=PACE_MS / 4):  # all arrive before the first ones end
        answers = generate(tight, with_options(bodies), 20)
    assert_cut_at_the_limit([answer["output_ids"] for answer in answers], expected)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert tight.get_json("/dspark/stats")["prompts"]["beside"] > beside
    assert_pool_is_whole(tight)


def test_bits_do_not_depend_on_other_requests(tight):
    """Tokens and log-probabilities, greedy and sampled: alone without drafts, and in a crowd that is retracted."""
    bodies = []
    for i, prompt in enumerate(prompts(16, seed=21)):
        sampled = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": i, "frequency_penalty": 0.2} if i % 2 else {}
        bodies.append(greedy(prompt[:60], 60, sampled, return_logprob=True))
    tight.flush_cache()
    with policy(tight, "off"):
        alone = [generate(tight, [body], 1)[0] for body in bodies]
    with policy(tight, "random", pace_ms=PACE_MS / 4):
        cached = generate(tight, bodies, 3)
        tight.flush_cache()
        crowded = together(tight, bodies)
    assert sum(answer["meta_info"]["num_retractions"] for answer in crowded) > 0
    assert sum(answer["meta_info"]["cached_tokens"] for answer in cached) > 0
    expected = [answer["meta_info"]["output_token_logprobs"] for answer in alone]
    for answers in (cached, crowded):
        assert [answer["meta_info"]["output_token_logprobs"] for answer in answers] == expected
    assert tight.get_json("/dspark/capabilities")["features"]["same_bits"]


def test_retracted_requests_keep_their_counts_grammars_and_hidden_states(tight):
    """Counts of penalties and states of grammars come back with the second prefill, and every token has its state."""
    bodies = []
    for i, prompt in enumerate(prompts(16, seed=8)):
        regex = {"regex": "(red|blue|green|cat|dog|bird)+"} if i % 3 == 0 else {}
        adjusted = {"frequency_penalty": 0.4, "repetition_penalty": 1.1, **regex}
        bodies.append(greedy(prompt[:60], 60, adjusted, return_hidden_states=True))
    with policy(tight, "auto", pace_ms=PACE_MS / 4):
        crowded, few = together(tight, bodies), generate(tight, bodies, 3)
    retractions = [sum(answer["meta_info"]["num_retractions"] for answer in answers) for answers in (crowded, few)]
    assert retractions[0] > retractions[1] == 0
    assert [answer["output_ids"] for answer in crowded] == [answer["output_ids"] for answer in few]
    for answer, other in zip(crowded, few, strict=True):
        torch.testing.assert_close(states_of(answer), states_of(other), atol=2e-4, rtol=2e-4)


POOL = 256  # of ``small_pool`` and ``ordered``, whose context has 1,024 tokens
# Prompts and tokens, of which the last ones end with the pool.
SIZES = [(243, 3), (249, 3), (244, 8), (238, 14), (248, 1), (180, 200), (216, 37), (249, 11), (206, 48), (226, 200)]


def bodies_near_the_end(sizes, seed, **fields):
    draw = random.Random(seed)
    return [endless(draw.choices(VOCAB, k=length), num_tokens, **fields) for length, num_tokens in sizes]


def said(answer):
    meta = answer["meta_info"]
    return answer["output_ids"], meta["finish_reason"], meta["prompt_tokens"], meta["completion_tokens"]


def expected_of(plain, bodies):
    """What a plain server with a pool as small says: SGLang ends texts two tokens before the end of the pool."""
    cut = []
    for body in bodies:
        most = min(body["sampling_params"]["max_new_tokens"], POOL - 2 - len(body["input_ids"]))
        cut.append(endless(body["input_ids"], most))
    return [said(answer) for answer in generate(plain, cut, 4)]


def test_lone_requests_at_the_end_of_a_pool_are_answered(small_pool, plain):
    """The last steps verify fewer drafts. A step used to keep 16 slots, whatever it verified, and SGLang to abort."""
    bodies = bodies_near_the_end(SIZES, seed=5)
    bodies[5]["speculation"] = {"enabled": False}
    assert [said(answer) for answer in generate(small_pool, bodies, 1)] == expected_of(plain, bodies)
    assert [said(last_answer(small_pool, bodies[6] | {"stream": True}))] == expected_of(plain, bodies[6:7])
    assert_pool_is_whole(small_pool)


@pytest.mark.parametrize("name", ["static", pytest.param("off", marks=pytest.mark.thorough)])
def test_requests_that_fill_a_pool_together_are_answered(small_pool, plain, name):
    """Some are retracted when a step without drafts no longer fits: what others keep for drafts ends none of them."""
    bodies = bodies_near_the_end([(90, 100), (120, 130), (100, 90), (30, 60), (70, 200), (110, 120)], seed=7)
    with policy(small_pool, name, {"policy": "static"}):
        answers = generate(small_pool, bodies, 6)
    assert [said(answer) for answer in answers] == expected_of(plain, bodies)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_whole(small_pool)


@pytest.mark.thorough
def test_replayed_steps_at_the_end_of_a_pool(ordered, plain):
    """Of a captured verification the rows without drafts are padding: they write to no slot of another request."""
    bodies = bodies_near_the_end([(246, 6), (238, 200), (120, 9), (121, 10)], seed=9)
    with policy(ordered, "static"):
        answers = [*generate(ordered, bodies[:2], 1), *together(ordered, bodies[2:])]
    assert [said(answer) for answer in answers] == expected_of(plain, bodies)
    assert_pool_is_whole(ordered)
