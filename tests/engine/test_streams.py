"""When streams are due: as often as on a server whose steps bring one token."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.engine.scheduler.streams import when_due


def sglang_accept(outputs, *, req):
    """SGLang's own choice, and what it remembers."""
    interval = req.sampling_params.stream_interval or outputs.default_stream_interval
    due = len(req.output_ids) % interval == (1 if interval > 1 else 0)
    if req.finished() or due:
        outputs.sent.append(len(req.output_ids))
        req.send_token_offset = len(req.output_ids)


def sent(steps, interval, default, accept):
    """Lengths of the text at which it was streamed."""
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(stream_interval=interval),
        output_ids=[],
        send_token_offset=0,
        stream=True,
        finished=lambda: False,
    )
    outputs = SimpleNamespace(default_stream_interval=default, sent=[])
    for place, tokens in enumerate(steps, start=1):
        req.output_ids += [0] * tokens
        req.finished = lambda place=place: place == len(steps)
        accept(outputs, req=req)
        assert req.sampling_params.stream_interval == interval
    return outputs.sent


def through_hook(outputs, *, req):
    when_due(sglang_accept, outputs, req=req)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=60),
    st.sampled_from([None, 1, 2, 3, 8, 50]),
    st.sampled_from([1, 5]),
)
def test_every_interval_is_streamed_at_the_end_of_the_step_that_fills_it(steps, interval, default):
    length = sum(steps)
    wanted = sent([1] * length, interval, default, sglang_accept)
    ends = [sum(steps[: place + 1]) for place in range(len(steps))]
    expected = sorted({next(end for end in ends if end >= due) for due in wanted})
    assert sent(steps, interval, default, through_hook) == expected


@given(st.integers(1, 100), st.sampled_from([None, 1, 2, 8]))
def test_steps_of_one_token_are_streamed_as_by_sglang(length, interval):
    steps = [1] * length
    assert sent(steps, interval, 1, through_hook) == sent(steps, interval, 1, sglang_accept)
