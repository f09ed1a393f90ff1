"""Tests of prompt lookup: its keys, OpenAI's field ``prediction``, and candidates in the served stages.

Refusals name key and remedy, and candidates change no text.
"""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS, USUAL, ChainRules, SecondTexts
from golden_server import CASES, LetterTokenizer, settled
from hypothesis import given
from hypothesis import strategies as st
from sglang_objects import batch
from stage_loop import NO_CHAINS, StageLoop, lookup_of

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.engine.requests import ASKED
from sglang_dspark.engine.server import DSparkServer
from sglang_dspark.features.builtin_worker import ScheduledServer
from sglang_dspark.features.prompt_lookup import CHAT_ROUTE, Predictions, keep_counts
from sglang_dspark.features.prompt_lookup.keys import (
    COUNTS,
    MAX_LABEL_TOKENS,
    NAMING,
    PRESETS,
    LookupKeys,
    lookup_options,
)
from sglang_dspark.step.decision import PLAIN, StepDecision, StepRecord
from sglang_dspark.step.selection import FixedLength

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
        ({"preset": "summary"}, "speculation.preset .* auto, none, summarization, .*'summary'"),
        ({"min_ngram": 3}, 'speculation.min_ngram .* summarization, .*speculation.preset is "a'),
        ({"preset": "classification", "candidates": ["a"], "max_ngram": 4}, "speculation.max_ngram "),
        ({"max_draft": 3}, "speculation.max_draft .* summarization or classification, "),
        ({"prediction": content("a"), "preset": "none"}, "speculation.prediction .* auto"),
        ({"prediction": content("a")}, "speculation.prediction needs a tokenizer"),
        ({"prediction": content("ab\ud83d")}, "speculation.prediction .* UTF-8 .*'ab"),
        ({"prediction": content("д" * 65537)}, "speculation.prediction .*131074 .*; pass at most 131072"),
        *(
            ({"prediction": value}, 'speculation.prediction .*{"type": "content", "content": TEXT}')
            for value in ("a", 7, [], {}, {"type": "content"}, content(None), content(7), content([7]), content(["a"]))
        ),
        ({"prediction": content("a") | {"type": "text"}}, "speculation.prediction "),
        ({"prediction": content([{"type": "image_url", "text": "a"}])}, "speculation.prediction "),
        ({"preset": "summarization", "max_draft": 0}, "speculation.max_draft .* 1"),
        ({"preset": "summarization", "min_ngram": 6}, "speculation.min_ngram=6 .*speculation.max_ngram=5"),
        ({"preset": "summarization", "max_ngram": 9}, "speculation.max_ngram .* 1 to 8, not 9"),
        ({"preset": "classification", "candidates": ["a" * 201]}, "speculation.candidates .*200"),
        ({"preset": "summarization", "candidates": ["a"]}, "speculation.candidates .* class"),
        ({"preset": "classification"}, "speculation.candidates "),
        ({"preset": "classification", "candidates": []}, "speculation.candidates .* 1 to 1000"),
        ({"preset": "classification", "candidates": [" "]}, "speculation.candidates "),
        ({"preset": "classification", "candidates": ["\ud800"]}, "speculation.candidates .*UTF-8"),
        ({"preset": "classification", "candidates": ["a"]}, "speculation.candidates needs a tokenizer"),
        *(({"cache": key}, "speculation.cache .* 1 to 256") for key in ("", 7, "a" * 257, "\ud800")),
        ({"cache": "a", "preset": "none"}, "speculation.cache .* auto or summarization"),
        ({"cache": "k"}, "speculation.cache='k' .*--speculative-dspark-answer-cache"),
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
        ("\N{ZERO WIDTH SPACE}", "no token; drop it"),
        ("yes \N{CYRILLIC SMALL LETTER A}", "token 1072 "),
        (chr(256), "token 256 .*; drop it"),
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
    with pytest.raises(ValueError, match=r"speculation.candidates .* 200 bytes, and 32768"):
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
    with pytest.raises(ValueError, match=r"speculation.prediction .*32769 .*; pass at most 32768"):
        predicted("a" * 32769)


PROMPTS = [case["prompt_ids"] for case in CASES[:2]]
TEXTS = [case["output_ids"] for case in CASES[:2]]
NUM_TOKENS = 40


def loop_of(*, chains):
    loop = StageLoop(schedule="static", lookup=True)
    loop.bounds = [USUAL if chains else NO_CHAINS]
    return loop


def test_boosts_and_confidences_rise_with_what_was_seen():
    """The golden target falls into loops: what the first requests have shown is there for the next ones."""
    loop = loop_of(chains=True)
    assert not loop.schedule.forecast.weights[0, :KIND_ROWS].any()
    for _ in range(2):
        assert loop.serve(PROMPTS, NUM_TOKENS) == [text[:NUM_TOKENS] for text in TEXTS]
    loop.schedule.forecast.update()
    boosts, least = loop.schedule.forecast.weights[:, :KIND_ROWS]
    assert (boosts[3:] > 1).any() and least[boosts > 1].isfinite().all()


def test_nothing_is_learned_of_requests_without_chains():
    loop = loop_of(chains=False)
    before = loop.schedule.forecast.weights
    loop.serve(PROMPTS, NUM_TOKENS)
    loop.schedule.forecast.update()
    assert torch.equal(loop.schedule.forecast.weights, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_seeded_text_is_the_same_whatever_competes_with_the_drafter(temperature):
    texts = [loop_of(chains=chains).serve(PROMPTS, 16, temperature, seeds=[3, 4]) for chains in (False, True)]
    assert texts[0] == texts[1]


def test_a_text_that_repeats_itself_is_copied_after_the_drafters_block():
    loop = StageLoop(block_size=15, schedule="static", lookup=True)
    loop.bounds = [(*USUAL[:3], ASKED_ROWS)]
    for _ in range(2):
        assert loop.serve(PROMPTS, NUM_TOKENS) == [text[:NUM_TOKENS] for text in TEXTS]
    assert max(kept for trace in loop.traces for *_, kept in trace) > 7


@pytest.mark.parametrize("options", [{"schedule": "static"}, {"draft_free": True}], ids=["drafter", "draft-free"])
def test_ids_of_pictures_are_never_copied(options):
    """They are past every vocabulary, and the text after them goes on with them where it repeats itself."""
    loop, prompt = StageLoop(**options, lookup=True), [7, 8, 9, 999, 999, 10, 7, 8, 9]
    loop.bounds = [(1, *USUAL[1:3], ASKED_ROWS)]
    loop.serve([prompt[:1]], 1)
    slots = loop.table[0].long()
    loop.drafter.remember(torch.tensor(prompt), slots[: len(prompt)])
    loop.texts = [prompt]
    block = loop.drafter.propose(loop.batch(2), 4, False, loop.schedule.forecast.weights)
    assert block.tokens.max() < 256 and block.chains[0, 1] == 0, "nothing is copied after the end of a passage"


def test_rules_are_those_of_the_requests_that_are_drafted():
    """Each of three requests has rules of its own; the second and the third are drafted."""
    loop, behind = StageLoop(schedule="static", lookup=True), torch.tensor([[5, 6], [20, 22], [30, 31]])
    loop.serve([*PROMPTS, PROMPTS[0]], 2)
    loop.bounds = [NO_CHAINS, NO_CHAINS, (*NO_CHAINS[:2], 1, NO_CHAINS[3])]
    step, ends = replace(loop.batch(9), rows_of=loop.rows), torch.full((3, 1), -1)
    texts = torch.cat([ends, step.anchors[:, None], behind, ends], 1)
    needed = torch.tensor([[9, 1, 9, 9, 9]] * 3)
    rows = torch.tensor([ASKED_ROWS, CACHED_ROWS, ASKED_ROWS])  # of what competes, nothing is known yet
    parts = texts, needed, rows[:, None].expand_as(texts), torch.arange(3)[:, None].expand_as(texts)
    rules = ChainRules(step.rules.bounds, SecondTexts(*(part.flatten() for part in parts)))
    step, decision = replace(step, rules=rules), StepDecision(4, FixedLength())
    whole = loop.eager.draft(step, decision).block.tokens
    some = loop.eager.draft(step, replace(decision, draft_requests=(1, 2))).block.tokens
    assert whole[0, :2].tolist() == [5, 6] and whole[2, 0] == 30 and whole[2, 1] != 31
    assert torch.equal(some[1:], whole[1:]) and whole[1, 0] != 20


PREDICTION = {"type": "content", "content": "да"}


def served(body, answers, sent, path=CHAT_ROUTE, asked=None, kind=b"application/json"):
    """Return what the application finds as ``speculation`` and as its body, and the ASGI messages of its answer.

    Args:
        answers: of the engine: entries of the counts by sample.
        sent: bodies that the application then sends.
    """
    found, messages = [], []

    async def engine(manager):
        for id_, entries in answers:
            yield {"meta_info": {"id": id_, COUNTS: entries, "other": 1}}

    async def application(scope, receive, send):
        found.extend([ASKED.get(), (await receive())["body"]])
        async for answer in keep_counts(engine, None):
            assert answer["meta_info"].keys() == {"id", "other"}
        headers = [(b"content-type", kind), (b"content-length", b"7"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, part in enumerate(sent):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(sent)})

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def respond(message):
        messages.append(message)

    async def serve():
        before = ASKED.set(asked)
        await Predictions(application)(
            {"type": "http", "method": "POST", "path": path, "headers": []}, receive, respond
        )
        assert ASKED.get() == asked  # of the next request
        ASKED.reset(before)

    asyncio.run(serve())
    return found, messages


def body_of(**fields):
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


@pytest.mark.parametrize("asked", [None, "{}", '{"max_verify": 3}'])
def test_the_field_becomes_a_key_of_speculation(asked):
    body = body_of(prediction=PREDICTION)
    for written in (body, body.replace(b"pred", b"\\u0070red"), body.decode().encode("utf-16")):
        [field, passed], _ = served(written, [], [b"{}"], asked=asked)
        assert passed == written
        assert json.loads(field) == json.loads(asked or "{}") | {"prediction": PREDICTION}


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (body_of(), None),
        (body_of(prediction=None), None),
        (body_of(messages="a prediction"), '{"max_verify": 3}'),
        (body_of(prediction=PREDICTION), '"x"'),
        (b"prediction, not JSON", None),
        (b"[" * 100_000 + b"prediction", None),
        (b'["prediction"]', None),
    ],
)
def test_other_bodies_are_left_alone(body, asked):
    answer = b'{"usage": {"completion_tokens": 1}}'
    [field, passed], messages = served(body, [], [answer], asked=asked)
    assert (field, passed) == (asked, body)
    assert messages[0]["headers"][1] == (b"content-length", b"7") and messages[1]["body"] == answer


def test_other_routes_are_left_alone():
    [field, _], _ = served(body_of(prediction=PREDICTION), [], [b"{}"], path="/v1/completions")
    assert field is None


def test_a_whole_answer_has_the_counts():
    """There are two samples, one of which came in two messages."""
    usage = {"usage": {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 2}}, "text": "да"}
    text = json.dumps(usage, ensure_ascii=False).encode()
    answers = [("a", [[1, 0], [2, 5]]), ("b", [[0, 1]]), ("a", [[3, 6]]), ("c", None)]
    _, [start, whole] = served(body_of(prediction=PREDICTION), answers, [text[:9], text[9:]])
    found = json.loads(whole["body"])
    assert found["usage"].pop("completion_tokens_details") == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 7,
    }
    assert found == {"usage": {"completion_tokens": 9}, "text": "да"}
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"x": b"y",
        b"content-length": str(len(whole["body"])).encode(),
    }


def test_an_error_stays_as_it_is():
    _, [_, whole] = served(body_of(prediction=PREDICTION), [], [b'{"error": "usage"}'])
    assert whole["body"] == b'{"error": "usage"}'


def test_the_usage_of_a_stream_has_the_counts():
    events = [b'data: {"choices": [1], "usage": null}', b'data: {"usage": {}, "choices": []}', b"data: [DONE]", b""]
    sent = [events[0] + b"\n\n", b"\n\n".join(events[1:])]
    _, [_, first, last] = served(body_of(prediction=PREDICTION), [("a", [[3, 6]])], sent, kind=b"text/event-stream")
    assert first["body"] == sent[0]
    event, *others = last["body"].split(b"\n\n")
    assert others == events[2:]
    details = json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}


def test_each_token_knows_what_was_owed_to_the_prediction_up_to_there():
    """Two output tokens were there before the prompt was encoded again; the second step has nothing predicted.

    The last token comes with another prompt, and is on the host later than that prompt is launched.
    """
    reqs = [settled(None), settled({"prediction": PREDICTION}, LetterTokenizer())]
    for req in reqs:
        req.output_ids.extend([1, 2])
    part = lookup_of(7)
    part.prefill_done(batch(*reqs, decoding_reqs=None))
    assert reqs[1].customized_info == {COUNTS: [(0, 0)] * 3}  # of the token to come, too
    reqs[1].output_ids.append(3)
    for copied, verified, tokens in ((4, 3, [5, 6, 7]), (0, 2, [8, 9]), (3, 7, [9])):
        chains = torch.tensor([[0, 0, -1], [ASKED_ROWS + 1, copied, 4]])
        rounds = StepRecord(["a", "b"], PLAIN, [7, 7], torch.tensor([1, verified]), None, None, chains=chains)
        part.tokens_come(batch(*reqs), DSparkBatchResult(record=rounds), [[5], tokens])
        reqs[1].output_ids.extend(tokens)
    part.prefill_done(batch(*reqs, decoding_reqs=reqs))
    assert reqs[1].customized_info[COUNTS][-1] == (2, 4) and len(reqs[1].customized_info[COUNTS]) == 9
    part.step_done(reqs, rounds, [0, 1], [0, 0])
    assert reqs[0].customized_info is None
    assert reqs[1].customized_info == {
        COUNTS: [*[(0, 0)] * 3, (1, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 4), (2, 4)],
    }
