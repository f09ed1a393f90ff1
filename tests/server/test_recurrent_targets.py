"""A target whose layers keep recurrent states on a server, as users start it: texts are those of the plain server.

The windows of its convolutions have 16 bits, though the model has 32. With 32 in both, and retracted: test_forms.py;
compared with transformers: tests/engine/test_checks.py; what a verification leaves in the states themselves:
tests/features/test_recurrent.py.
"""

from __future__ import annotations

import random

import pytest
from golden_server import (
    VOCAB,
    assert_pool_is_whole,
    beginning_alike,
    begun_stream,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    output_ids,
    policy,
)

pytestmark = pytest.mark.slow

NUM_TOKENS = 32


@pytest.fixture
def expected(plain_hybrid):
    """Greedy continuations of six requests."""
    return output_ids(plain_hybrid, beginning_alike(6), 2)


def test_rejected_drafts(hybrid, expected):
    """All at once, and then few at a time: next to no draft of a random drafter is right."""
    hybrid.flush_cache()
    bodies = beginning_alike(6)
    with policy(hybrid, "random"), counting(hybrid) as grown:
        assert output_ids(hybrid, bodies, 6) == expected
        assert output_ids(hybrid, bodies, 2) == expected
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100


def test_accepted_drafts(hybrid, plain_hybrid):
    """Texts of three tokens, which go on as they did before more often than not."""
    only = {"logit_bias": {str(token): 60 for token in (17, 40, 99)}}
    bodies = [greedy(body["input_ids"], NUM_TOKENS, only) for body in beginning_alike(6)]
    copying = [{**body, "speculation": {"preset": "summarization", "min_ngram": 1}} for body in bodies]
    with policy(hybrid, "random"), counting(hybrid) as grown:
        assert output_ids(hybrid, copying, 6) == output_ids(plain_hybrid, bodies, 6)
    assert grown["accepted_tokens"] > 30
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 10


def test_turns_begin_where_others_ended(hybrid, plain_hybrid):
    """The cached state is that of the text that ended, in a step of one token, of more than that, or with a prompt."""
    bodies = beginning_alike(4)
    texts = output_ids(plain_hybrid, bodies, 1)
    for server in (hybrid, plain_hybrid):
        server.flush_cache()
    with policy(hybrid, "static"):
        for cut in (3, 8, 14):
            first = [
                greedy(body["input_ids"], 30, {"stop_token_ids": [text[cut - 1]]})
                for body, text in zip(bodies, texts, strict=True)
            ]
            prompts = prompts_of_other_texts(seed=cut)
            others = in_background(lambda prompts=prompts: output_ids(hybrid, prompts, 2))
            answers = output_ids(hybrid, first, 4)
            others.join()
            assert answers == output_ids(plain_hybrid, first, 1)
            turns = [
                endless([*body["input_ids"], *answer, 17, 23], 8) for body, answer in zip(bodies, answers, strict=True)
            ]
            found, expected = generate(hybrid, turns, 1), generate(plain_hybrid, turns, 1)
            assert [answer["output_ids"] for answer in found] == [answer["output_ids"] for answer in expected]
            cached = [answer["meta_info"]["cached_tokens"] for answer in found]
            assert max(count - len(body["input_ids"]) for count, body in zip(cached, bodies, strict=True)) > 0


def prompts_of_other_texts(seed):
    """Return requests of one token each, whose prompts are encoded with whatever runs."""
    draw = random.Random(seed)
    return [greedy(draw.choices(VOCAB, k=40), 1) for _ in range(20)]


def test_grammars_and_log_probabilities(hybrid, plain_hybrid):
    bodies = [
        greedy(body["input_ids"], 24, {"regex": "([a-h]{3}[0-9],){2,5}x"}, return_logprob=True, top_logprobs_num=2)
        for body in beginning_alike(4)
    ]
    with policy(hybrid, "static"):
        found, expected = generate(hybrid, bodies, 4), generate(plain_hybrid, bodies, 4)
    for answer, other in zip(found, expected, strict=True):
        assert answer["output_ids"] == other["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            pairs = zip(flat(answer["meta_info"][name]), flat(other["meta_info"][name]), strict=True)
            assert all(abs(one - another) < 1e-3 for one, another in pairs)


def flat(logprobs):
    """Log-probabilities and ids in lists of any depth."""
    if isinstance(logprobs, list):
        return [number for part in logprobs for number in flat(part)]
    return [] if logprobs is None or isinstance(logprobs, str) else [logprobs]


def test_clients_that_go_away(hybrid, expected):
    """Their slots go to others, which start from zeros."""
    bodies = beginning_alike(6)
    with policy(hybrid, "random"):
        for body in bodies[:4]:
            with begun_stream(hybrid, endless(body["input_ids"], 150)):
                pass
        assert output_ids(hybrid, bodies, 4) == expected
    assert_pool_is_whole(hybrid)


def test_a_grammar_ends_a_text_that_ignores_its_end(hybrid, plain_hybrid):
    """A plain server forgets that a grammar of llguidance's has ended, and draws end tokens up to the length."""
    asked = greedy([17, 40, 99], 10, {"regex": "[a-c]{3}", "ignore_eos": True})
    ours, theirs = (server.post_json("/generate", asked)["output_ids"] for server in (hybrid, plain_hybrid))
    assert len(ours) == 4
    assert theirs == ours + ours[-1:] * 6
