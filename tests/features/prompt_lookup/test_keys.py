"""Keys of prompt lookup: what is taken over, and that every refusal names its key and what would do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settled_requests import LetterTokenizer, settled

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.server import DSparkServer
from sglang_dspark.features.builtin_worker import ScheduledServer
from sglang_dspark.features.prompt_lookup.keys import MAX_LABEL_TOKENS, NAMING, PRESETS, LookupKeys, lookup_options

lengths = st.integers(1, 8)
texts = st.text(st.characters(exclude_categories=["Cs"]))
predictions = st.fixed_dictionaries(
    {
        "type": st.just("content"),
        "content": texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3),
    }
)
labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50).filter(str.strip)


@st.composite
def good_fields(draw):
    """Any object that has to be accepted."""
    preset = draw(st.sampled_from(PRESETS))
    required, optional = {"preset": st.just(preset)}, {}
    if preset in ("auto", "summarization"):
        optional["cache"] = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
    if preset in NAMING:
        optional["max_draft"] = st.integers(1, 65535)
    if preset == "auto":
        optional["prediction"] = predictions
    if preset == "classification":
        required["candidates"] = st.lists(labels, min_size=1, max_size=4)
    value = draw(st.fixed_dictionaries(required, optional=optional))
    if preset == "summarization" and draw(st.booleans()):
        value["min_ngram"], value["max_ngram"] = sorted((draw(lengths), draw(lengths)))
    return value


@given(good_fields())
def test_good_fields_are_taken_over_and_reach_the_scheduler(value):
    options = lookup_options(settled(json.loads(json.dumps(value)), LetterTokenizer(), answer_cache=1))
    for key in {*value} - {"candidates", "prediction"}:
        assert getattr(options, key) == value[key]
    content = value.get("prediction", {}).get("content", "")
    whole = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert options.predicted == ((tuple(map(ord, whole)),) if whole else ())
    expected = {tuple(map(ord, label)) for label in value.get("candidates", ())}
    assert expected <= {*options.labels} and bool(expected) == bool(options.labels)


def content(text):
    """OpenAI's form of a predicted text."""
    return {"type": "content", "content": text}


@pytest.mark.parametrize(
    "value", [None, {}, {"preset": "auto"}, {"trace": True}, {"prediction": content("")}, {"prediction": content([])}]
)
def test_values_that_ask_for_nothing(value):
    req = settled(value)
    assert lookup_options(req) == LookupKeys() and lookup_options(req) is lookup_options(req)
    assert "prompt_lookup" not in str(req.sampling_params.custom_params)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"preset": "summary"}, "speculation.preset must be one of auto, none, summarization, .*, not 'summary'"),
        ({"min_ngram": 3}, 'speculation.min_ngram belongs to the preset summarization, but speculation.preset is "a'),
        ({"preset": "classification", "candidates": ["a"], "max_ngram": 4}, "speculation.max_ngram belongs to"),
        ({"max_draft": 3}, "speculation.max_draft belongs to the preset summarization or classification, "),
        ({"preset": "replay"}, "speculation.preset must be one of auto, none, summarization, classification, not "),
        ({"prediction": content("a"), "preset": "none"}, "speculation.prediction belongs to the preset auto"),
        ({"prediction": content("a")}, "speculation.prediction needs a tokenizer"),
        ({"prediction": content("ab\ud83d")}, "speculation.prediction must be text that UTF-8 can encode, not 'ab"),
        ({"prediction": content("д" * 65537)}, "speculation.prediction has 131074 bytes; pass at most 131072"),
        *(
            ({"prediction": value}, 'speculation.prediction must be {"type": "content", "content": TEXT} with a string')
            for value in ("a", 7, [], {}, {"type": "content"}, content(None), content(7), content([7]), content(["a"]))
        ),
        ({"prediction": content("a") | {"type": "text"}}, "speculation.prediction must be"),
        ({"prediction": content([{"type": "image_url", "text": "a"}])}, "speculation.prediction must be"),
        ({"preset": "summarization", "max_draft": 0}, "speculation.max_draft must be an integer from 1"),
        ({"preset": "summarization", "min_ngram": 6}, "speculation.min_ngram=6 exceeds speculation.max_ngram=5"),
        ({"preset": "summarization", "max_ngram": 9}, "speculation.max_ngram must be an integer from 1 to 8, not 9"),
        ({"preset": "classification", "candidates": ["a" * 201]}, ".*must be strings of at most 200"),
        ({"preset": "summarization", "candidates": ["a"]}, "speculation.candidates belongs to the preset class"),
        ({"preset": "classification"}, "speculation.candidates is missing"),
        ({"preset": "classification", "candidates": []}, "speculation.candidates must be a list of 1 to 1000 strings"),
        ({"preset": "classification", "candidates": [" "]}, "speculation.candidates must be a list"),
        ({"preset": "classification", "candidates": ["\ud800"]}, "speculation.candidates must be text that UTF-8"),
        ({"preset": "classification", "candidates": ["a"]}, "speculation.candidates needs a tokenizer"),
        *(({"cache": key}, "speculation.cache must be a string of 1 to 256") for key in ("", 7, "a" * 257, "\ud800")),
        ({"cache": "a", "preset": "none"}, "speculation.cache belongs to the preset auto or summarization"),
        ({"cache": "k"}, "speculation.cache='k' needs .* start this one with --speculative-dspark-answer-cache"),
    ],
)  # fmt: skip
def test_refused_keys(value, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        settled(value)


def test_keys_that_a_server_does_not_serve():
    every = [*LookupKeys.key_types()]

    def unserved(server, **options):
        return list(LookupKeys.unserved(server(DSparkConfig(**options))))

    ours = lambda config: DSparkServer(config, drafter=None, dummy_draft=False)  # noqa: E731
    assert unserved(ours, answer_cache=1) == [] and unserved(ours) == ["cache"]
    assert unserved(ScheduledServer) == every


def with_labels(tokenizer, candidates, **more):
    return settled({"preset": "classification", "candidates": candidates}, tokenizer, **more)


def test_labels_arrive_in_both_spellings():
    assert lookup_options(with_labels(LetterTokenizer(), ["ab"])).labels == (tuple(b"ab"), tuple(b" ab"))


def test_the_labels_of_a_batch_are_tokenized_once():
    tokenizer = LetterTokenizer()
    for _ in range(3):
        with_labels(tokenizer, ["yes", "no"])
    assert tokenizer.calls == 1


def test_too_many_tokens_are_refused_by_name():
    candidates = [f"{place:0100d}" for place in range(100)]
    with pytest.raises(ValueError, match=rf"speculation.candidates are {100 * 201} tokens.*at most {MAX_LABEL_TOKENS}"):
        with_labels(LetterTokenizer(), candidates)
    assert with_labels(LetterTokenizer(), candidates[:80])


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("\N{ZERO WIDTH SPACE}", "which has no token; drop it"),
        ("yes \N{CYRILLIC SMALL LETTER A}", "whose token 1072 the target does not have"),
        (chr(256), "whose token 256 the target does not have .its ids lie below 256.; drop it"),
    ],
)
def test_labels_that_no_answer_can_hold_are_refused_by_name(label, named):
    """A normaliser takes some letters for nothing, and a tokenizer may know more tokens than its model."""

    class Normalising(LetterTokenizer):
        def __call__(self, texts, **options):
            return super().__call__([text.strip(" \N{ZERO WIDTH SPACE}") for text in texts], **options)

    with pytest.raises(ValueError, match=f"speculation.candidates holds .*{named}"):
        with_labels(Normalising(), ["no", label], vocab_size=256)
    assert with_labels(Normalising(), ["no", chr(255)], vocab_size=256)


@pytest.mark.parametrize("candidates", [["\N{GRINNING FACE}" * 51], [f"{place:0199d}" for place in range(200)]])
def test_too_many_bytes_are_refused_before_they_are_tokenized(candidates):
    with pytest.raises(
        ValueError, match=r"speculation.candidates must be strings of at most 200 bytes, and 32768 in all"
    ):
        with_labels(None, candidates)


def predicted(text, **more):
    return lookup_options(settled({"prediction": content(text)}, **({"tokenizer": LetterTokenizer()} | more))).predicted


def test_a_prediction_arrives_in_parts_that_the_target_can_write():
    parts = [{"type": "text", "text": "да"}, {"type": "text", "text": ", 日"}]
    assert predicted(parts) == predicted("да, 日") == (tuple(map(ord, "да, 日")),)
    assert predicted("ab\u0100c\u0101\u0102", vocab_size=256) == (tuple(b"ab"), tuple(b"c"))
    assert predicted("\u0100", vocab_size=256) == ()


def test_too_many_predicted_tokens_are_refused_by_name():
    assert len(predicted("a" * 32768)[0]) == 32768
    with pytest.raises(ValueError, match=r"speculation.prediction has 32769 tokens; pass at most 32768"):
        predicted("a" * 32769)
