"""Parsing the ``speculation`` field: what is accepted, and that every refusal names its key and what would do."""

import json
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.speculation import COPYING, PRESETS, RequestOptions, Speculation

KEYS = [option.name for option in fields(Speculation)]

lengths = st.integers(1, 8)
labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50).filter(str.strip)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(PRESETS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def good_fields(draw):
    """Any object that has to be accepted."""
    preset = draw(st.sampled_from(PRESETS))
    optional = {
        "enabled": st.booleans(),
        "trace": st.booleans(),
        "max_verify": st.integers(0, 65535),
        "confidence_threshold": st.floats(0, 1) | st.integers(0, 1),
    }
    required = {"preset": st.just(preset)}
    if preset in ("auto", "summarization"):
        optional["cache"] = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
    if preset in COPYING:
        optional["max_draft"] = st.integers(1, 65535)
    if preset == "replay":
        required["recorded"] = st.lists(st.integers(0, 200_000), min_size=1, max_size=9)
    if preset == "classification":
        required["candidates"] = st.lists(labels, min_size=1, max_size=4)
    value = draw(st.fixed_dictionaries(required, optional=optional))
    if preset == "summarization" and draw(st.booleans()):
        value["min_ngram"], value["max_ngram"] = sorted((draw(lengths), draw(lengths)))
    return value


@given(good_fields())
def test_good_fields_are_taken_over_and_reach_the_scheduler(value):
    field = Speculation.parse(json.loads(json.dumps(value)))
    for key, entry in value.items():
        assert getattr(field, key) == (tuple(entry) if key in ("candidates", "recorded") else entry)
    options = field.for_scheduler(((1, 2), (3,)))
    assert msgspec.json.decode(msgspec.json.encode(options), type=RequestOptions) == options
    for key in {*value} & {"preset", "min_ngram", "max_ngram", "max_draft", "trace", "confidence_threshold", "cache"}:
        assert getattr(options, key) == value[key]
    assert options.labels == ((field.recorded,) if field.recorded else ((1, 2), (3,)))


@pytest.mark.parametrize(
    "value", [None, {}, {"trace": False}, {"enabled": True, "preset": "auto", "confidence_threshold": 0}]
)
def test_values_that_ask_for_nothing(value):
    assert Speculation.parse(value).for_scheduler(()) == RequestOptions()


def refusal(value):
    """Why a value is refused; None when it is not."""
    try:
        Speculation.parse(value)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), anything, max_size=4) | anything)
def test_whatever_comes_is_parsed_or_refused_by_name(value):
    message = refusal(value)
    if message is not None:
        assert message.startswith("speculation")
        assert not isinstance(value, dict) or any(
            f"speculation.{repr(key)[1:-1]}" in message for key in [*value, "candidates"]
        )


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"enabled": 1}, "speculation.enabled must be true or false, not 1"),
        ({"max_verify": -1}, "speculation.max_verify must be an integer from 0 to 65535, not -1"),
        ({"max_verify": True}, "speculation.max_verify must be an integer"),
        ({"max_verify": 2**70}, "speculation.max_verify must be an integer"),
        ({"confidence_threshold": 1.5}, "speculation.confidence_threshold must be a number from 0 to 1, not 1.5"),
        ({"confidence_threshold": float("nan")}, "speculation.confidence_threshold must be a number from 0 to 1"),
        ({"preset": "summary"}, "speculation.preset must be one of auto, none, summarization, .*, not 'summary'"),
        ({"min_ngram": 3}, 'speculation.min_ngram belongs to the preset summarization, but speculation.preset is "a'),
        ({"preset": "classification", "candidates": ["a"], "max_ngram": 4}, "speculation.max_ngram belongs to"),
        ({"max_draft": 3}, "speculation.max_draft belongs to the preset summarization or classification or replay"),
        ({"preset": "replay"}, "speculation.recorded is missing: the preset replay needs the token ids of the answer"),
        ({"preset": "replay", "recorded": [-1]}, "speculation.recorded must be a list of 1 to 32768 token ids"),
        ({"recorded": [3]}, "speculation.recorded belongs to the preset replay"),
        ({"preset": "summarization", "max_draft": 0}, "speculation.max_draft must be an integer from 1"),
        ({"preset": "summarization", "min_ngram": 6}, "speculation.min_ngram=6 exceeds speculation.max_ngram=5"),
        ({"preset": "summarization", "max_ngram": 9}, "speculation.max_ngram must be an integer from 1 to 8, not 9"),
        ({"preset": "classification", "candidates": ["a" * 201]}, ".*must be strings of at most 200"),
        ({"preset": "summarization", "candidates": ["a"]}, "speculation.candidates belongs to the preset class"),
        ({"preset": "classification"}, "speculation.candidates is missing"),
        ({"preset": "classification", "candidates": []}, "speculation.candidates must be a list of 1 to 1000 strings"),
        ({"preset": "classification", "candidates": [" "]}, "speculation.candidates must be a list"),
        ({"preset": "classification", "candidates": ["\ud800"]}, "speculation.candidates must be text that UTF-8"),
        ({"\ud800": 1}, r"speculation.\\ud800 is not a known option"),
        *(({"cache": key}, "speculation.cache must be a string of 1 to 256") for key in ("", 7, "a" * 257, "\ud800")),
        ({"cache": "a", "preset": "none"}, "speculation.cache belongs to the preset auto or summarization"),
        ({"cache": "a", "preset": "replay", "recorded": [3]}, "speculation.cache belongs to the preset auto or summar"),
        ({"tracing": True}, "speculation.tracing is not a known option; known are cache, candidates, confidence_thre"),
        ([], r"speculation must be an object, not \[\]"),
    ],
)  # fmt: skip
def test_refused_speculation_fields(value, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        Speculation.parse(value)


def test_limits_of_a_request():
    def limit(**options):
        return Speculation(**options).for_scheduler(()).verify_limit(7)

    assert [limit(), limit(max_verify=3), limit(max_verify=9)] == [7, 3, 7]
    assert [limit(enabled=False, max_verify=3), limit(max_verify=0)] == [0, 0]
