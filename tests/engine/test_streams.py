"""When streams are due: as often as on a server whose steps bring one token."""

from functools import partial
from itertools import accumulate
from operator import eq
from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.engine.scheduler import streams

INTERVALS = st.sampled_from([None, 1, 2, 3, 8, 50])
DEFAULTS = st.sampled_from([1, 5])
STEPS = st.lists(st.integers(1, 8), min_size=1, max_size=60)


def request(interval):
    return SimpleNamespace(
        sampling_params=SimpleNamespace(stream_interval=interval),
        output_ids=[],
        send_token_offset=0,
        stream=True,
        finished=lambda: False,
        sent=[],
    )


def sglang_streams(default, reqs):
    """SGLang's own choice, and what it remembers."""
    for req in reqs:
        interval, unsent = req.sampling_params.stream_interval or default, len(req.output_ids) - req.send_token_offset
        if req.finished() or interval == 1 or unsent >= interval or not req.send_token_offset:
            req.sent.append(len(req.output_ids))
            req.send_token_offset = len(req.output_ids)


def told(default):
    """A process that serves with this ``--stream-interval``."""
    return patch.object(streams, "get_serving", lambda: SimpleNamespace(stream_interval=default))


def sent(texts, default, stream):
    """For each of several requests, given as (interval, tokens of each step): lengths at which it was streamed."""
    reqs = [request(interval) for interval, _ in texts]
    for step in range(max(len(steps) for _, steps in texts)):
        running = [(req, steps) for req, (_, steps) in zip(reqs, texts, strict=True) if step < len(steps)]
        for req, steps in running:
            req.output_ids += [0] * steps[step]
            req.finished = partial(eq, step + 1, len(steps))
        stream(default, [req for req, _ in running])
        assert [req.sampling_params.stream_interval for req in reqs] == [interval for interval, _ in texts]
    return [req.sent for req in reqs]


def through_hook(default, reqs):
    with told(default):
        streams.when_due(lambda streamer, due: sglang_streams(default, due), None, reqs)


@given(st.lists(st.tuples(INTERVALS, STEPS), min_size=1, max_size=4), DEFAULTS)
def test_every_interval_is_streamed_at_the_end_of_the_step_that_fills_it(texts, default):
    plain = sent([(interval, [1] * sum(steps)) for interval, steps in texts], default, sglang_streams)
    ends = [list(accumulate(steps)) for _, steps in texts]
    expected = [
        sorted({next(end for end in of_text if end >= due) for due in wanted})
        for of_text, wanted in zip(ends, plain, strict=True)
    ]
    assert sent(texts, default, through_hook) == expected


@given(st.lists(st.tuples(INTERVALS, st.integers(1, 100)), min_size=1, max_size=3), DEFAULTS)
def test_steps_of_one_token_are_streamed_as_by_sglang(texts, default):
    singly = [(interval, [1] * length) for interval, length in texts]
    assert sent(singly, default, through_hook) == sent(singly, default, sglang_streams)


def test_what_else_sglang_is_told_reaches_it():
    spaced, other, seen = request(8), request(1), []
    spaced.output_ids = [0] * 3
    spaced.send_token_offset = 1
    with told(1):
        streams.when_due(
            lambda *args, **kwargs: seen.append((args, kwargs)), "streamer", [spaced, other], True, skip_req=9
        )
    assert seen == [(("streamer", [other], True), {"skip_req": 9})]


def test_answers_that_are_not_streamed_are_left_to_sglang():
    req, seen = request(8), []
    req.stream, req.output_ids = False, [0] * 3
    with told(1):
        streams.when_due(lambda streamer, reqs: seen.extend(reqs), None, [req])
    assert seen == [req]
