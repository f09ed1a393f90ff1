"""A stream of steps, cut into messages of one token."""

import asyncio

import pytest
from byte_tokenizer import save_byte_tokenizer
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_objects import partly, server_args
from transformers import AutoTokenizer

from sglang_dspark.engine.hooks import Moment
from sglang_dspark.features import streams as module
from sglang_dspark.features.streams import StreamCutter, look_at_answers, stream_tokens

SKIPPED = 2  # <mask>, a token without a text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path_factory.mktemp("bytes"), 1000))


def messages(tokenizer, ids, ends, incremental, trimmed=0):
    """Return the messages of steps that end at these tokens; the last text lacks so many characters."""
    begin = shown = 0
    for end in ends:
        text = tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip("\ufffd")
        finished = end == len(ids)
        text = text[: len(text) - trimmed] if finished else text
        first = begin if incremental else 0
        yield {
            "text": text[shown:] if incremental else text,
            "output_ids": ids[first:end],
            "meta_info": {
                "finish_reason": {"type": "stop"} if finished else None,
                "completion_tokens": end,
                "reasoning_tokens": end,
                "output_token_logprobs": [(-float(place), ids[place], None) for place in range(first, end)],
                "output_token_logprobs_length": end,
                "dspark_trace": [{"start": place} for place in range(first, end)],
                "hidden_states": [[[0.5], [0.25]], *([float(token)] for token in ids[1:end])],
                **({"dspark": {"rounds": 2}, "dspark_slo": {"outcome": "met"}} if finished else {}),
            },
        }
        begin, shown = end, len(text)


def cut(tokenizer, given, incremental, every_token=True):
    cutter = StreamCutter(tokenizer, {}, incremental=incremental)
    return [message for answer in given for message in cutter.cut(answer, every_token=every_token)]


@pytest.mark.parametrize("incremental", [False, True])
def test_each_token_of_one_step_has_a_message_and_what_belongs_to_it(tokenizer, incremental):
    ids = tokenizer("abcde", add_special_tokens=False)["input_ids"]
    ids.insert(2, SKIPPED)
    found = cut(tokenizer, messages(tokenizer, ids, [1, 6], incremental), incremental)
    assert found == list(messages(tokenizer, ids, range(1, 7), incremental))


@pytest.mark.parametrize("incremental", [False, True])
def test_without_a_parser_the_last_token_alone_is_apart(tokenizer, incremental):
    ids = tokenizer("abcdefgh", add_special_tokens=False)["input_ids"]
    found = cut(tokenizer, messages(tokenizer, ids, [1, 4, 8], incremental), incremental, every_token=False)
    assert found == list(messages(tokenizer, ids, [1, 4, 7, 8], incremental))


@pytest.mark.parametrize("incremental", [False, True])
def test_a_letter_that_is_cut_between_two_steps(tokenizer, incremental):
    ids = tokenizer("a\u00e9bc", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5  # two of them are one letter
    found = cut(tokenizer, messages(tokenizer, ids, [2, 5], incremental), incremental)
    assert found == list(messages(tokenizer, ids, range(1, 6), incremental))


def test_what_a_stop_string_cuts_off_is_in_no_message(tokenizer):
    ids = tokenizer("abc end", add_special_tokens=False)["input_ids"]
    found = cut(tokenizer, messages(tokenizer, ids, [1, 7], False, trimmed=4), False)
    assert [message["text"] for message in found] == ["a", "ab", "abc", "abc"]
    assert found[-1]["output_ids"] == ids
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "stop"}


@pytest.mark.parametrize(
    ("stream", "parser", "intervals", "expected"),
    [
        (True, "qwen25", (1, None), 5),
        (True, None, (1, None), 3),
        (False, "qwen25", (1, None), 2),
        (True, "qwen25", (1, 4), 2),
        (True, "qwen25", (4, None), 2),
        (True, "qwen25", (4, 1), 5),
    ],
)
def test_the_server_and_the_request_decide(tokenizer, stream, parser, intervals, expected):
    ids = tokenizer("abcde", add_special_tokens=False)["input_ids"]

    async def answers():
        for message in messages(tokenizer, ids, [1, 5], False):
            yield message

    async def number():
        manager = partly(
            TokenizerManager,
            server_args=server_args(tool_call_parser=parser, stream_interval=intervals[0]),
            tokenizer=tokenizer,
            incremental_streaming_output=False,
        )
        obj = GenerateReqInput(stream=stream, sampling_params={"stream_interval": intervals[1]})
        return len([message async for message in stream_tokens(answers(), manager, obj=obj, state=None)])

    assert asyncio.run(number()) == expected


@pytest.mark.parametrize(("reason", "looked"), [("stop", True), ("length", True), ("abort", False)])
def test_hooks_are_looked_for_with_the_first_answer_that_was_decoded(reason, looked, monkeypatch):
    """One that was aborted while it waited has not been where the others are."""
    moments = []
    monkeypatch.setattr(module, "check", moments.append)

    async def answers():
        yield {"meta_info": {"finish_reason": None}}
        assert moments == []
        yield {"meta_info": {"finish_reason": {"type": reason}}}

    async def number():
        return len([answer async for answer in look_at_answers(answers())])

    assert asyncio.run(number()) == 2
    assert moments == [Moment.ANSWERED] * looked


class Counting:
    """A tokenizer whose tokens are bytes, which counts those that it has read."""

    def __init__(self):
        self.read = 0

    def decode(self, ids, **options):
        self.read += len(ids)
        return b"".join(ids).decode(errors="replace")


HALVES = [b"\xf0"] * 4000
# No token ends with a letter, though every step completes some.
ACROSS = ["한".encode()[:1], *["한".encode()[1:] + "글".encode()[:2], "글".encode()[2:] + "한".encode()[:1]] * 2000]


@pytest.mark.parametrize("step", [5, 4000])
@pytest.mark.parametrize("run", [HALVES, ACROSS], ids=["halves", "across"])
def test_a_run_of_half_letters_is_read_as_often_as_other_text(run, step):
    tokenizer, ids = Counting(), [b"a", *run, b"x", b"z"]
    cutter, found = StreamCutter(tokenizer, {}, incremental=False), []
    for end in (*range(1, len(ids), step), len(ids)):
        text, last = b"".join(ids[:end]).decode(errors="replace"), end == len(ids)
        meta_info = {"finish_reason": {"type": "stop"} if last else None, "completion_tokens": end}
        answer = {"text": text if last else text.rstrip("\ufffd"), "output_ids": ids[:end], "meta_info": meta_info}
        found += cutter.cut(answer, every_token=True)
    assert tokenizer.read < 16 * len(ids)
    assert [message["text"][-2:] for message in found[-2:]] == ["\ufffdx", "xz"]


def test_the_hidden_state_of_the_last_token_is_in_its_message_alone(tokenizer):
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    given = list(messages(tokenizer, ids, [1, 3], False))
    for number, message in enumerate(given):
        message["meta_info"]["hidden_states"] = [float(number), 0.5]
    found = [message["meta_info"].get("hidden_states") for message in cut(tokenizer, given, False)]
    assert found == [[0.0, 0.5], None, [1.0, 0.5]]
