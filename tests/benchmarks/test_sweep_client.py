"""The closed-loop client against a small HTTP server in the same process."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from serving.client import ReplyError, Sampling, ask_all, flush_cache
from serving.prompts import Prompt

PROMPTS = [Prompt(index, f"prompt {index}") for index in range(7)]


class FakeEngine:
    """Streams every prompt back word by word, and notes how it was asked."""

    def __init__(self):
        self.bodies, self.running, self.most_running, self.flushes = [], 0, 0, 0
        self.break_off = False

    async def complete(self, request):
        body = await request.json()
        self.bodies.append((request.path, body))
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if text == "refused":
            return web.json_response({"message": "too long"}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = text.split()
        for event in self._events(request.path, words):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.002)
        if not self.break_off:
            usage = {"completion_tokens": len(words) + 1, "prompt_tokens": len(text)}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response

    def _events(self, path, words):
        if path == "/v1/completions":
            yield from ({"choices": [{"text": word + " "}]} for word in words)
            yield {"choices": [{"text": "", "finish_reason": "stop"}]}
        else:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            yield from ({"choices": [{"delta": {"content": word + " "}}]} for word in words)
            yield {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}

    async def flush(self, request):
        self.flushes += 1
        return web.Response(status=200 if "timeout" in request.query else 400)


@contextmanager
def served(engine):
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        application = web.Application()
        application.router.add_post("/v1/completions", engine.complete)
        application.router.add_post("/v1/chat/completions", engine.complete)
        application.router.add_post("/flush_cache", engine.flush)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(runner.addresses[0][1])
        return runner

    def run():
        runner = loop.run_until_complete(start())
        loop.call_soon(ready.set)
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("raw", [False, True])
def test_replies_come_in_the_order_of_the_prompts(raw):
    engine, answered = FakeEngine(), []
    with served(engine) as url:
        sampling = Sampling(max_tokens=9, temperature=0.5, ignore_eos=True, raw=raw)
        replies = ask_all(url, PROMPTS, 3, sampling, lambda: answered.append(1))
    assert [reply.prompt_index for reply in replies] == list(range(7))
    assert [reply.text for reply in replies] == [f"prompt {index} " for index in range(7)]
    assert engine.most_running == 3
    assert len(answered) == 7
    path, body = engine.bodies[0]
    assert path == ("/v1/completions" if raw else "/v1/chat/completions")
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0.5, True)


def test_times_and_tokens_of_a_reply():
    with served(FakeEngine()) as url:
        (reply,) = ask_all(url, [Prompt(4, "one two three")], 8, Sampling(max_tokens=9, temperature=0))
    assert reply.num_tokens == 4 and reply.num_prompt_tokens == len("one two three")
    assert len(reply.chunks_s) == 3 and len(reply.gaps_s) == 2  # neither the role nor the finish reason is text
    assert reply.sent_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.chunks_s[2] <= reply.done_s
    assert reply.tpot_s == pytest.approx((reply.done_s - reply.chunks_s[0]) / 3)


def test_refused_request_fails_the_round_with_the_message_of_the_server():
    with served(FakeEngine()) as url, pytest.raises(ReplyError, match=r"HTTP 400.*too long"):
        ask_all(url, [*PROMPTS, Prompt(9, "refused")], 2, Sampling(max_tokens=9, temperature=0))


def test_stream_that_ends_early_fails_the_round():
    engine = FakeEngine()
    engine.break_off = True
    with served(engine) as url, pytest.raises(ReplyError, match="prompt 0 ended without"):
        ask_all(url, PROMPTS[:1], 1, Sampling(max_tokens=9, temperature=0))


def test_unreachable_server_is_a_reply_error():
    with served(FakeEngine()) as url:
        pass
    with pytest.raises(ReplyError, match="ClientConnectorError"):
        ask_all(url, PROMPTS[:1], 1, Sampling(max_tokens=9, temperature=0))
    with pytest.raises(ReplyError, match="flush_cache"):
        flush_cache(url)


def test_flush_waits_for_the_last_batch():
    engine = FakeEngine()
    with served(engine) as url:
        flush_cache(url)
    assert engine.flushes == 1
