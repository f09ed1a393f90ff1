"""The ``speculation`` field from the front end's one check to what the scheduler reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settled_requests import settled, settled_params

from sglang_dspark.engine.request_options import BatchOptions, Speculation, request_options
from sglang_dspark.engine.requests import ASKED, known_keys
from sglang_dspark.step.state import RequestLimits


@pytest.mark.parametrize("field", ['{"max_verify": 2, "trace": true}', {"max_verify": 2, "trace": True}])
def test_text_of_a_body_and_an_object_of_a_program_are_the_same(field):
    req = settled_params({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params["mine"] == 1
    assert isinstance(req.sampling_params.custom_params["dspark"], str)
    assert request_options(req) == Speculation(max_verify=2, trace=True)


@pytest.mark.parametrize("field", [None, {}, "null", "{}", '{"trace": false}', {"enabled": True}])
def test_values_that_ask_for_nothing_leave_no_trace(field):
    req = settled_params({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params == {"mine": 1}
    assert request_options(req) == Speculation()


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": 1}, {"dspark": {"max_verify": 7}}])
def test_the_field_of_a_body_wins_over_what_the_body_carries_itself(custom_params):
    before = ASKED.set('{"max_verify": 2}')
    try:
        req = settled_params(custom_params)
    finally:
        ASKED.reset(before)
    assert request_options(req) == Speculation(max_verify=2)
    assert ("mine" in req.sampling_params.custom_params) == ("mine" in (custom_params or {}))


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": {"max_verify": 2}}])
def test_requests_without_the_field_are_left_alone(custom_params):
    req = settled_params(custom_params)
    assert req.sampling_params.custom_params is custom_params
    assert request_options(req) == Speculation()


def test_requests_that_share_their_custom_params_are_each_checked():
    """Prompts of a batch do: what is checked once must not be read as a client's own."""
    shared = {"dspark": '{"max_verify": 2, "trace": false}'}
    first, second = (settled_params(shared) for _ in range(2))
    assert request_options(first) == request_options(second) == Speculation(max_verify=2)
    assert shared["dspark"].endswith('"trace": false}')


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("x", "speculation must be an object, not 'x'"),
        ([], r"speculation must be an object, not \[\]"),
        ({"enabled": 1}, "speculation.enabled must be true or false, not 1"),
        ('{"max_verify": -1}', "speculation.max_verify must be an integer from 0 to 65535, not -1"),
        ({"max_verify": True}, "speculation.max_verify must be an integer"),
        ({"max_verify": 2**70}, "speculation.max_verify must be an integer"),
        ({"confidence_threshold": 1.5}, "speculation.confidence_threshold must be a number from 0 to 1, not 1.5"),
        ({"confidence_threshold": float("nan")}, "speculation.confidence_threshold must be a number from 0 to 1"),
        ({"confidence_threshold": 0.5}, "speculation.confidence_threshold needs a drafter with a confidence head"),
        ('{"labels": [[7, 8]]}', "speculation.labels is not a known option"),
        (
            {"tracing": True},
            "speculation.tracing is not a known option; known are .*enabled, .*trace",
        ),
        ({"\ud800": 1}, r"speculation.\\ud800 is not a known option"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "speculation is nested too deeply"),
    ],
)
def test_bad_values_are_refused_by_name(field, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        settled(field)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["none", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*known_keys()]) | st.text(max_size=6), anything, max_size=4) | anything)
def test_whatever_comes_is_taken_or_refused_by_name(value):
    try:
        settled(value)
    except ValueError as error:
        message = str(error)
        assert message.startswith("speculation")
        assert not isinstance(value, dict) or any(
            f"speculation.{repr(key)[1:-1]}" in message for key in [*value, "candidates"]
        )


def test_options_of_a_request_are_read_once():
    req = settled({"max_verify": 2})
    assert request_options(req) is request_options(req)


def test_a_batch_has_limits_only_if_a_request_asks_for_less():
    usual, traced, short = map(settled, (None, {"trace": True}, {"max_verify": 2}))
    assert BatchOptions.of([usual, usual], 7).limits is None
    assert BatchOptions.of([traced, short], 7) == BatchOptions(RequestLimits((7, 2)), traced=True, ids=["r", "r"])
    assert BatchOptions.of([usual, short], 2).limits is None


def test_limits_of_a_request():
    def limit(**field):
        return request_options(settled(field)).verify_limit(7)

    assert [limit(), limit(max_verify=3), limit(max_verify=9)] == [7, 3, 7]
    assert [limit(enabled=False, max_verify=3), limit(max_verify=0)] == [0, 0]


def test_requests_for_which_nothing_is_drafted_verify_nothing():
    one, other = settled(None), settled({"trace": True})
    assert BatchOptions.of([one, other], 7, lambda req: req is other).limits == RequestLimits((0, 7))
