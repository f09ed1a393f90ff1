"""The clients against a small HTTP server in the same process."""

import pytest
from fake_engine import FakeEngine, served
from serving.client import ReplyError, Sampling, ask_all
from serving.prompts import Prompt

PROMPTS = [Prompt(index, f"prompt {index}") for index in range(7)]
GREEDY = Sampling(max_tokens=9, temperature=0)


@pytest.mark.parametrize("raw", [False, True])
def test_replies_come_in_the_order_of_the_prompts(raw):
    engine = FakeEngine(together=3)
    with served(engine) as url:
        sampling = Sampling(max_tokens=9, temperature=0.5, ignore_eos=True, raw=raw)
        replies = ask_all(url, PROMPTS, sampling, users=3)
    assert [reply.prompt_index for reply in replies] == list(range(7))
    assert [reply.text for reply in replies] == [f"prompt {index} " for index in range(7)]
    assert engine.most_running == 3
    path, body = engine.bodies[0]
    assert path == ("/v1/completions" if raw else "/v1/chat/completions")
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0.5, True)


def test_times_and_tokens_of_a_reply():
    with served(FakeEngine()) as url:
        (reply,) = ask_all(url, [Prompt(4, "one two three")], GREEDY, users=1)
    assert reply.num_tokens == 4 and reply.num_prompt_tokens == len("one two three")
    assert len(reply.chunks_s) == 3 and len(reply.gaps_s) == 2  # neither the role nor the finish reason is text
    assert (reply.tokens, reply.kept) == ((1, 2, 3), (1, 2))
    assert reply.sent_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.chunks_s[2] <= reply.done_s
    assert reply.tpot_s == pytest.approx((reply.done_s - reply.chunks_s[0]) / 3)


def test_refused_request_fails_the_round_with_the_message_of_the_server():
    with served(FakeEngine()) as url, pytest.raises(ReplyError, match=r"HTTP 400.*too long"):
        ask_all(url, [*PROMPTS, Prompt(9, "refused")], GREEDY, users=2)
