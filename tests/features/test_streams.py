"""Tests of streams that steps of several tokens are cut into: together they are the text without a stream.

Every parser of SGLang reads them as it reads the plain server's.
"""

import asyncio
import random
import re
from types import SimpleNamespace

import pytest
from letter_tokenizers import KINDS, letter_tokenizer, mixed_text, save_byte_tokenizer
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang_objects import partly, server_args
from transformers import AutoTokenizer

from sglang_dspark.engine.hooks import Moment
from sglang_dspark.features import streams as module
from sglang_dspark.features.streams import StreamCutter, look_at_answers, stream_tokens, whole_letters

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
def test_without_a_parser_only_the_last_token_is_apart(tokenizer, incremental):
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
    monkeypatch.setattr(module, "check_called", moments.append)

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


def test_the_hidden_state_of_the_last_token_is_only_in_its_message(tokenizer):
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    given = list(messages(tokenizer, ids, [1, 3], False))
    for number, message in enumerate(given):
        message["meta_info"]["hidden_states"] = [float(number), 0.5]
    found = [message["meta_info"].get("hidden_states") for message in cut(tokenizer, given, False)]
    assert found == [[0.0, 0.5], None, [1.0, 0.5]]


DECODE = DetokenizerManager._decode_batch_token_id_output
TOKENIZERS = {kind: letter_tokenizer(kind) for kind in KINDS}


def kept(manager, output):
    """Decode with our hook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_manager, "find_printable_text", whole_letters)
        return DECODE(manager, output)


def manager_of(tokenizer):
    """SGLang's object without its sockets."""
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size = tokenizer, len(tokenizer)
    manager.decode_status = LimitedCapacityDict(capacity=1000)
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = frozenset()
    return manager


def pieces(decode, manager, prompt, ids, ends, reason):
    """The texts of the messages that end at these tokens."""
    begin, found = 0, []
    for end in ends:
        message = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[ids[begin:end] if begin else prompt + ids[:end]],
            read_offsets=[len(prompt)],
            finished_reasons=[reason if end == len(ids) else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        found += decode(manager, message)
        begin = end
    return found


def streams(kind, number, most, seed=0):
    """Random answers, and where their messages end, in steps of up to so many tokens, after five of a prompt.

    Some end within a letter, or at a stop string of ideographs; with bytes for what a tokenizer does not know, a letter
    that is never complete changes what is before it, with and without speculation.
    """
    rng, tokenizer = random.Random(seed), TOKENIZERS[kind]
    for _ in range(number):
        prompt, ids = (tokenizer(mixed_text(rng), add_special_tokens=False)["input_ids"] for _ in range(2))
        reason = {"type": "length"}
        if kind in ("bytes", "pieces") and rng.random() < 0.3:
            ids = ids[: rng.randint(1, len(ids))]
        elif rng.random() < 0.2:
            ids += tokenizer("終了", add_special_tokens=False)["input_ids"]
            reason = {"type": "stop", "matched": "終了"}
        ends = [1]
        while ends[-1] < len(ids):
            # SGLang's scheduler keeps back what a stop string may begin with.
            end = min(len(ids), ends[-1] + rng.randint(1, most))
            stops = reason["type"] == "stop" and end > len(ids) - 10
            ends.append(len(ids) if stops else end)
        yield prompt[-5:], ids, ends, reason


def differing(decode, kind, number, most):
    """Counts the streams that are not the text of the answer without a stream."""
    manager = manager_of(TOKENIZERS[kind])
    return sum(
        "".join(pieces(decode, manager, prompt, ids, ends, reason))
        != "".join(pieces(DECODE, manager, prompt, ids, [len(ids)], reason))
        for prompt, ids, ends, reason in streams(kind, number, most)
    )


@pytest.mark.parametrize("number", [150, pytest.param(2500, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_the_text(kind, number):
    for most in (1, 4, 16):
        assert differing(kept, kind, number // 3, most) == 0


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_sglang_repeats_letters_in_steps_of_several_tokens(kind):
    """Why the detokenizer is patched at all."""
    assert differing(DECODE, kind, 150, 1) == 0
    assert differing(DECODE, kind, 150, 8) > 5


def test_what_precedes_a_cut_letter_is_shown_at_once():
    """SGLang would wait for a message that ends between two letters."""
    ids = TOKENIZERS["bytes"]("🎉😀한글", add_special_tokens=False)["input_ids"]
    ends = [1, 6, 10, 13, len(ids)]
    assert [
        pieces(decode, manager_of(TOKENIZERS["bytes"]), [], ids, ends, {"type": "length"}) for decode in (DECODE, kept)
    ] == [["", "", "", "", "🎉😀한글"], ["", "🎉", "😀", "한", "글"]]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_cut_are_the_same_text(kind, every_token, incremental):
    """And each is cut between letters. Of tokens that are bytes, none has two letters that are complete."""
    tokenizer = TOKENIZERS[kind]
    manager = manager_of(tokenizer)
    for prompt, ids, ends, reason in streams(kind, 60, 8):
        shown, begin, found = "", 0, []
        cutter = StreamCutter(tokenizer, {}, incremental=incremental)
        texts = pieces(kept, manager, prompt, ids, ends, reason)
        for text, end in zip(texts, ends, strict=True):
            shown += text
            answer = {
                "text": text if incremental else shown,
                "output_ids": ids[begin if incremental else 0 : end],
                "meta_info": {"finish_reason": reason if end == len(ids) else None, "completion_tokens": end},
            }
            found += cutter.cut(answer, every_token=every_token)
            begin = end
        whole = "".join(texts)
        new = [message["text"] for message in found]
        if not incremental:
            new = [text.removeprefix(before) for before, text in zip(["", *new], new, strict=False)]
        if kind == "bytes":
            assert all(len(text.rstrip("\ufffd")) <= 1 for text in (new if every_token else new[-1:]))
        if incremental:
            assert "".join(message["text"] for message in found) == whole
            assert [id_ for message in found for id_ in message["output_ids"]] == ids
        else:
            assert all(whole.startswith(message["text"]) for message in found)
            assert (found[-1]["text"], found[-1]["output_ids"]) == (whole, ids)


ARGUMENTS = '{"city": "Bern", "days": 2}'
BAR = "\uff5c"  # of DeepSeek's marks
TOOL_CALLS = [
    f'Sure. <tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    '[get_weather(city="Bern", days=2)]',
    f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
    (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    f"<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n{ARGUMENTS}\n```".replace(
        "|", BAR
    )
    + "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", BAR),
    f"<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>{ARGUMENTS}".replace("|", BAR)
    + "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", BAR),
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    f'<|action_start|> <|plugin|>\n{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|action_end|>',
    (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bern</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
]
REASONING = [
    "<think>It is simple.\nVery.</think>\n\nThe answer is 4.",
    "It is simple.</think>The answer is 4.",
    "◁think▷It is simple.◁/think▷The answer is 4.",
    "<|channel|>analysis<|message|>It is simple.<|end|><|start|>assistant<|channel|>final<|message|>The answer is 4.",
    "[THINK]It is simple.[/THINK]The answer is 4.",
    "Here is my thought process: it is simple. Here is my response: the answer is 4.",
]
NEEDS_CHECKPOINT = {"response_template"}
TOOL_PARSERS = sorted(FunctionCallParser.ToolCallParserEnum.keys() - NEEDS_CHECKPOINT)
REASONING_PARSERS = sorted(ReasoningParser.DetectorMap.keys() - NEEDS_CHECKPOINT)
TOOL = Tool(function=Function(name="get_weather", parameters={"type": "object", "properties": {}}))


class Words:
    """A tokenizer whose tokens are the words and signs of one text."""

    def __init__(self, text):
        self.words = re.findall(r"\s*\w+|\s+|[^\w\s]", text)

    def decode(self, ids, **options):
        return "".join(self.words[place] for place in ids)


def steps_of(text, seed):
    """Return the texts of steps of one to seven tokens, and what becomes of them."""
    tokenizer, rng, begin = Words(text), random.Random(seed), 0
    cutter = StreamCutter(tokenizer, {}, incremental=True)
    steps, messages = [], []
    while begin < len(tokenizer.words):
        end = min(len(tokenizer.words), begin + rng.randint(1, 7))
        ids = list(range(begin, end))
        reason = {"type": "stop"} if end == len(tokenizer.words) else None
        meta_info = {"finish_reason": reason, "completion_tokens": end}
        answer = {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta_info}
        messages += [message["text"] for message in cutter.cut(answer, every_token=True)]
        steps.append(answer["text"])
        begin = end
    return steps, messages, tokenizer.words


def tool_calls(name, pieces):
    """Return the text and the calls, by number, that a parser makes of a stream."""
    parser, texts, calls = FunctionCallParser([TOOL], name), [], {}
    for piece in pieces:
        text, found = parser.parse_stream_chunk(piece)
        texts.append(text)
        for call in found:
            function, arguments = calls.setdefault(call.tool_index, ([], []))
            function.append(call.name or "")
            arguments.append(call.parameters or "")
    return "".join(texts), {number: tuple(map("".join, parts)) for number, parts in calls.items()}


def reasoning(name, pieces):
    """Return the reasoning and the text that a parser makes of a stream."""
    parser, parts = ReasoningParser(name), ([], [])
    for piece in pieces:
        for part, text in zip(parts, parser.parse_stream_chunk(piece), strict=True):
            part.append(text or "")
    return tuple(map("".join, parts))


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_tool_calls_are_those_of_single_tokens(name):
    for seed, text in enumerate(TOOL_CALLS):
        _, messages, tokens = steps_of(text, seed)
        assert tool_calls(name, messages) == tool_calls(name, tokens)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning_is_that_of_single_tokens(name):
    for seed, text in enumerate(REASONING):
        _, messages, tokens = steps_of(text, seed)
        assert reasoning(name, messages) == reasoning(name, tokens)


def test_parsers_lose_parts_of_whole_steps():
    """Why streams are cut at all: some parsers read a stream of steps otherwise."""
    streams = [steps_of(text, seed) for seed, text in enumerate(TOOL_CALLS)]
    lost = [
        name
        for name in TOOL_PARSERS
        if any(tool_calls(name, steps) != tool_calls(name, tokens) for steps, _, tokens in streams)
    ]
    assert len(lost) > 3
