"""A small HTTP server that answers like SGLang, without a model."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web


class FakeEngine:
    """Streams every prompt back word by word, and notes how it was asked.

    Args:
        together: requests of which none is answered before so many have come.
    """

    def __init__(self, together=1):
        self._together, self._begun = together, asyncio.Event()
        self.bodies, self.running, self.most_running, self.flushes, self.kept = [], 0, 0, 0, [1, 2]

    async def complete(self, request):
        body = await request.json()
        self.bodies.append((request.path, body))
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if text == "refused":
            return web.json_response({"message": "too long"}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == self._together:
            self._begun.set()
        await asyncio.wait_for(self._begun.wait(), 60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = text.split()
        for number, event in enumerate(self._events(request.path, words)):
            if body["stream_options"]["continuous_usage_stats"]:
                event["usage"] = {"completion_tokens": number, "prompt_tokens": len(text)}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.002)
        if body["return_spec_tokens_details"]:
            details = {"spec_tokens_details": {"spec_correct_drafts_histogram": self.kept}}
            await response.write(b"data: " + json.dumps({"choices": [], "sglext": details}).encode() + b"\n\n")
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
        return web.Response()


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
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
