"""Every parser of SGLang reads a stream that was cut into tokens as it reads the plain server's."""

import random
import re

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_dspark.features.streams import StreamCutter

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
