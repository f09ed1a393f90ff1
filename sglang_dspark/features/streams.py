"""Streams: messages of one token each, which together are the text, though a step brings several tokens.

A step brings several tokens, and SGLang puts them into one message. Some of its consumers expect one token in each:
parsers of tool calls lose the arguments of a call that is complete at once, parsers of reasoning miss a mark that a
message cuts, and Ollama's routes drop the text of the last message.

In SGLang's detokenizer, a text that ends within a letter is shown as without speculation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookType
from transformers import PreTrainedTokenizerBase

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import Moment, check_called, hook
from sglang_dspark.engine.sglang_types import Answer, TokenizerManager

# Token ids before a window of text: some tokenizers decode the first token of a text otherwise. SGLang's number.
_CONTEXT = 5
_WINDOW = 16  # token ids, after which a new one is looked for
_LETTER = 4  # bytes of UTF-8 at most
# Of the meta_info: lists with an entry per token, as are all whose names begin so, counts of tokens, and what only the
# end of an answer has.
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "dspark_")
_COUNTS = {"output_token_logprobs_length", "reasoning_tokens"}
_OF_THE_END = {"dspark", "dspark_slo"}
_INCOMPLETE = "\ufffd"


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
    HookType.AFTER,
    where="front_end",
    reason="parsers of tool calls and reasoning, and Ollama's routes, expect messages of one token, not of a step; "
    "with the first answer it is also known which hooks SGLang calls",
)
async def stream_tokens(
    answers: AsyncIterator[Answer],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    state: object,
    request: object = None,
) -> AsyncIterator[Answer]:
    """Yield the answers of one request: cut the messages of a stream where its tokens end. A hook.

    If the server has a parser of tool calls or reasoning, every token gets a message of its own. Otherwise only what
    completes the last letter does, which the routes of Ollama drop. Streams at a longer interval stay as they are:
    there a message has several tokens without speculation, too.
    """
    answers, arguments = look_at_answers(answers), manager.server_args
    one_by_one = getattr(obj, "stream", False) and manager.tokenizer is not None
    if not one_by_one or (obj.sampling_params.get("stream_interval") or arguments.stream_interval) > 1:
        async for answer in answers:
            yield answer
        return
    parsed = bool(arguments.tool_call_parser or arguments.reasoning_parser)
    cutter = StreamCutter(manager.tokenizer, obj.sampling_params, incremental=manager.incremental_streaming_output)
    async for answer in answers:
        for message in cutter.cut(answer, every_token=parsed):
            yield message


async def look_at_answers(answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
    """Yield the answers of one request; before the last one, look for our hooks.

    A request that is aborted while it waits ends without most of what SGLang does with an answer.

    Raises:
        EngineError: see :func:`~sglang_dspark.engine.hooks.check_called`.
    """
    async for answer in answers:
        reason = (answer.get("meta_info") or {}).get("finish_reason")
        if reason is not None and reason["type"] != "abort":
            check_called(Moment.ANSWERED)
        yield answer


class StreamCutter:
    """Cuts the messages of one stream into messages of one token.

    Args:
        tokenizer: the server's.
        parameters: of the request, as the client sent them: which tokens have a text.
        incremental: a message has the text and token ids that are new; otherwise all of them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, parameters: Mapping[str, object], *, incremental: bool
    ) -> None:
        self._tokenizer, self._incremental = tokenizer, incremental
        self._options = {
            name: bool(parameters.get(name, True)) for name in ("skip_special_tokens", "spaces_between_special_tokens")
        }
        self._ids: list[int] = []
        self._text = ""
        self._ends = [(0, 0)]  # tokens, and characters of their text, where messages end

    def cut(self, answer: Answer, *, every_token: bool) -> Iterator[Answer]:
        """Yield the messages that take the place of `answer`, which is the last of them.

        Args:
            every_token: cut after every token; otherwise only once, as late in the last message as can be.
        """
        meta_info, text = answer.get("meta_info") or {}, answer.get("text")
        known, shown = len(self._ids), len(self._text)
        if not isinstance(text, str) or meta_info.get("completion_tokens") is None:
            yield answer
            return
        self._ids += answer["output_ids"][0 if self._incremental else known :]
        self._text = self._text + text if self._incremental else text
        finished = meta_info.get("finish_reason") is not None
        cuts = list(self._cuts(known, shown)) if every_token or finished else []
        if not every_token:
            cuts = cuts[-1:]
        start = known
        for end, length in cuts:
            yield self._part(answer, (start, end), (shown, length))
            start, shown = end, length
        yield self._part(answer, (start, len(self._ids)), (shown, len(self._text))) if cuts else answer
        self._ends.append((len(self._ids), len(self._text)))

    def _cuts(self, known: int, shown: int) -> Iterator[tuple[int, int]]:
        """Yield (tokens, characters of their text) for every new token whose text can be told from what follows.

        Windows of text begin at the last ends. Far past these no text is made where a letter is cut: a whole text may
        consist of such ends.

        Args:
            known: tokens that are not new.
            shown: characters of their text.
        """
        if len(self._text) <= shown:
            return
        start, before, length = -_WINDOW, "", 0
        for end in range(known + 1, len(self._ids)):
            if end - start > _WINDOW:
                if self._cuts_letter(end):
                    continue
                start, before, length = self._window()
            new = self._decoded(start, end)[len(before) :]
            told = new and not new.endswith(_INCOMPLETE) and length + len(new) >= shown
            # What a stop string has cut off, or a tokenizer writes otherwise in a longer text, is no prefix.
            if told and self._text.startswith(new, length):
                self._ends.append((end, length + len(new)))
                yield self._ends[-1]

    def _cuts_letter(self, end: int) -> bool:
        """Return whether no letter ends there. One has at most four bytes, so it begins within four tokens."""
        starts = range(end - 1, max(end - 1 - _LETTER, -1), -1)
        return all(self._decoded(start, end).endswith(_INCOMPLETE) for start in starts)

    def _window(self) -> tuple[int, str, int]:
        """Return the token at which a window begins, its text up to the last end, and the characters up to there."""
        while True:  # until an end at which no letter is cut, such as the beginning
            known, length = self._ends[-1]
            start = next((end for end, _ in reversed(self._ends) if end <= known - _CONTEXT), 0)
            before = self._decoded(start, known)
            if not before.endswith(_INCOMPLETE):
                return start, before, length
            self._ends.pop()

    def _decoded(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], **self._options))

    def _part(self, answer: Answer, tokens: tuple[int, int], text: tuple[int, int]) -> Answer:
        """Return the message of the tokens and characters in these ranges; a whole one begins at 0."""
        meta_info, end = dict(answer["meta_info"]), tokens[1]
        if not self._incremental:
            tokens, text = (0, end), (0, text[1])
        begin = len(self._ids) - len(answer["output_ids"]) if self._incremental else 0
        for name, entries in meta_info.items():
            if name.startswith(_PER_TOKEN) and isinstance(entries, list):
                meta_info[name] = entries[tokens[0] - begin : end - begin]
        if end < len(self._ids):
            meta_info = {name: value for name, value in meta_info.items() if name not in _OF_THE_END}
            meta_info |= {"finish_reason": None, "completion_tokens": end}
            for name in _COUNTS & meta_info.keys():
                meta_info[name] = min(meta_info[name], end)
            if (states := meta_info.pop("hidden_states", None)) and isinstance(states[0], list):
                meta_info["hidden_states"] = states[:end]  # of all tokens so far; else only that of a later one
        ids = self._ids[slice(*tokens)]
        return answer | {"text": self._text[slice(*text)], "output_ids": ids, "meta_info": meta_info}


@hook(
    "sglang.srt.managers.detokenizer_manager.find_printable_text",
    HookType.REPLACE,
    where="children",
    reason="SGLang shows text twice, or late, if messages after each other end within different letters, as steps may",
    by=Moment.SOME_TIME,  # called only in the detokenizer
)
def whole_letters(text: str) -> str:
    """Return the new text of a stream up to the letter within which it ends. A hook.

    SGLang shows the text up to an ideograph just before that letter, or up to the last space. With a token in a step
    little else can stand there. With several, the next text may end within another letter, before which that rule finds
    less, and SGLang shows text twice. A text without ideographs and spaces may stay hidden for many steps. All that
    precedes the incomplete letter is shown here instead.
    """
    return text.rstrip(_INCOMPLETE)


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
)
