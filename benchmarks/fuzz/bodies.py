"""Draw request bodies from all keys that a request may have: right ones, odd ones and wrong ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
MODES = ("whole", "whole", "stream", "stream", "dropped", "abandoned")
"""How an answer is read: whole, as a stream, a stream that is dropped after a few parts, or not at all."""

VOCABULARY = 256
UNKNOWN = ("<extra>", "<image>")  # to the target: their ids are past its vocabulary
VANISHING = "\N{ZERO WIDTH SPACE}"  # to the tokenizer

# Letters of a script share their first bytes; pairs that differ in the last one.
WORDS = (
    *"да нет дом é è e\u0301 日本 日木 あい あう 한국 한글 نعم نعت לא कि की".split(),
    *("😀", "😁", "👩‍👩‍👧", "🇩🇪", "yes", "no", "true", "a b", "{", '"', "\\", "ß", "ﬁ", "𝒳", "\u202eab", "\ufeff"),
)
ODD_WORDS = (
    *("", " ", "\n", VANISHING, "\x00", *UNKNOWN, "<pad>", "<eos>", "�", "x" * 200, "да" * 100),
    "ok" + UNKNOWN[0],
)
HALF_LETTERS = ("\ud83d", "ab\udc00", "\ud800" * 3)
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 2**31, 2**63, 10**30, 1e308, float("nan")),
    *("x", "", [], {}, [[]], [None], {"a": {"b": [1]}}, *HALF_LETTERS),
)
LONG = 20_000  # letters of a constant

Values = Sequence[Any]
"""What a key may be; functions make one from the drawing."""


@dataclass(frozen=True)
class Body:
    """A request.

    Attributes:
        path: its route.
        fields: its body.
        mode: one of :data:`MODES`.
    """

    path: str
    fields: dict[str, Any]
    mode: str

    @property
    def text(self) -> str:
        """Return its fields as JSON in which letters stand for themselves, as far as they are whole."""
        return json.dumps(self.fields, ensure_ascii=False)


class Draw:
    """Draws the bodies of a number, always the same.

    Args:
        seed: of the run.
        index: number of the body in it.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._random = random.Random(f"{seed} {index}")

    def body(self) -> Body:
        """Return a request that is right, or has one to three wrong values."""
        path = self._random.choice((GENERATE, GENERATE, COMPLETIONS, CHAT))
        mode = self._random.choice(MODES)
        fields = {GENERATE: self._generate, COMPLETIONS: self._completion, CHAT: self._chat}[path]()
        if self._often(0.6):
            fields["speculation"] = self._speculation()
        if mode in ("stream", "dropped"):
            fields["stream"] = True
        if self._often(0.15):
            for _ in range(self._random.randint(1, 3)):
                self._spoil(fields)
        return Body(path, fields, mode)

    def through_doors(self, body: Body) -> Body:
        """Return a request that also asks for what only servers with flags for it serve."""
        if body.path != GENERATE:
            return body
        fields = body.fields | self._some(DOORS, 4)
        if self._often(0.15):
            self._spoil(fields)
        return Body(body.path, fields, body.mode)

    def turn(self) -> dict[str, Any]:
        """Return the place of a request in a session."""
        return {"id": self._random.choice(SESSIONS), **self._some(TURN, 2)}

    def word(self) -> str:
        """Return a text of a few letters."""
        return self._random.choice(ODD_WORDS if self._often(0.1) else WORDS)

    def words(self) -> list[str]:
        return [self.word() for _ in range(self._random.choice((1, 2, 2, 3, 8)))]

    def prose(self) -> str:
        """Return a prompt."""
        length = self._random.choice((0, 1, 3, 10, 30, 100)) if self._often(0.3) else 4
        return self._random.choice((" ", "")).join(self.word() for _ in range(length))

    def ids(self) -> list[int]:
        """Return token ids, sometimes past the vocabulary."""
        edge = self._random.choice((VOCABULARY, VOCABULARY + len(UNKNOWN), 2**31)) if self._often(0.1) else 0
        drawn = self._random.choices(range(VOCABULARY), k=self._random.choice((1, 2, 5, 17, 64, 300)))
        return [*drawn, edge] if edge else drawn * self._random.choice((1, 1, 1, 2))

    def prediction(self) -> dict[str, Any]:
        """Return a predicted text, sometimes a long one, in either form."""
        text = self.prose() * self._random.choice((1, 1, 1, 1, 1000))
        parts = [{"type": "text", "text": part} for part in (text, self.word())]
        return {"type": "content", "content": self._random.choice((text, parts))}

    def biases(self) -> dict[str, float]:
        tokens = self._random.sample(range(VOCABULARY), self._random.choice((1, 3, 40)))
        return {str(token): self._random.choice((-100.0, -1, 3.5, 30, 100)) for token in tokens}

    def pattern(self) -> str:
        """Return a regular expression."""
        either = "|".join(filter(None, map(_escaped, self.words())))
        return self._random.choice(
            (f"ok: ({either})", f"({either}){{1,9}}", f"[^{self._random.choice('аé日a')}]+", ".*")
        )

    def schema(self) -> Any:
        """Return a JSON schema."""
        return self._chosen(
            (
                {"enum": self.words()},
                {"const": self._random.choice(("д", "日", "a", "😀", "<extra>")) * self._random.choice((1, 20, LONG))},
                {"type": "object", "properties": {word: {"enum": self.words()} for word in self.words()}},
                {"type": "object", "properties": {"имя": {"type": "string", "maxLength": 6}}, "required": ["имя"]},
                {"type": "array", "items": {"anyOf": [{"const": word} for word in self.words()]}, "maxItems": 5},
                {"type": "string", "pattern": "^[а-я]{2,5}$"},
                {"type": "integer"},
                {},
            )
        )

    def ebnf(self) -> str:
        """Return a grammar in the form of the EBNF that xgrammar and llguidance read."""
        either = " | ".join(json.dumps(word, ensure_ascii=False) for word in self.words() if "\x00" not in word)
        return f"root ::= item+\nitem ::= {either or '[a-z]'}"

    def tags(self) -> dict[str, Any]:
        """Return a structural tag."""
        begin = self._random.choice(("<да>", "{", "[日", "<f>"))
        return {
            "type": "structural_tag",
            "structures": [
                {"begin": begin, "schema": self.schema(), "end": self._random.choice(("}", "</да>", "日]"))}
            ],
            "triggers": [begin[: self._random.choice((1, 2, 9))]],
        }

    def response_format(self) -> dict[str, Any]:
        schema = {"type": "json_schema", "json_schema": {"name": "имя", "schema": self.schema()}}
        return self._random.choice((schema, schema, {"type": "json_object"}, {"type": "text"}, self.tags()))

    def tools(self) -> list[dict[str, Any]]:
        names = self._random.sample(("save", "сохранить", "保存", "저장"), self._random.choice((1, 2)))
        parameters = {"type": "object", "properties": {"слово": {"enum": self.words()}}, "required": ["слово"]}
        return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]

    def _often(self, share: float) -> bool:
        return self._random.random() < share

    def _chosen(self, values: Values) -> Any:
        value = self._random.choice(values)
        return value(self) if callable(value) else value

    def _some(self, table: Mapping[str, Values], most: int) -> dict[str, Any]:
        keys = self._random.sample(sorted(table), min(len(table), self._random.randint(0, most)))
        return {key: self._chosen(table[key]) for key in keys}

    def _grammar(self) -> dict[str, Any]:
        key = self._random.choice(sorted(GRAMMARS)) if self._often(0.4) else None
        return {key: GRAMMARS[key](self)} if key else {}

    def _sampling(self, table: Mapping[str, Values]) -> dict[str, Any]:
        length = self._random.choice((1, 2, 3, 5, 8, 12, 24, 48))
        return {"temperature": 0, "max_new_tokens": length} | self._some(table, 4) | self._grammar()

    def _generate(self) -> dict[str, Any]:
        parameters = self._sampling(SAMPLING)
        prompt = {"text": self.prose()} if self._often(0.5) else {"input_ids": self.ids()}
        fields = {**prompt, "sampling_params": parameters, **self._some(FIELDS, 3)}
        if self._often(0.05):
            fields |= self._some(REFUSED, 1)
        if self._often(0.05):
            fields |= {key: [value] * 2 for key, value in prompt.items()}
        return fields

    def _completion(self) -> dict[str, Any]:
        asked = self._sampling(SAMPLING)
        prompt = self._chosen((Draw.prose, Draw.ids, Draw.words))
        return {"model": "m", "prompt": prompt, **_renamed(asked), **self._some(COMPLETION_FIELDS, 3)}

    def _chat(self) -> dict[str, Any]:
        roles = self._random.choice((("user",), ("system", "user"), ("user", "assistant", "user")))
        messages = [{"role": role, "content": self.prose()} for role in roles]
        asked = {key: value for key, value in self._sampling(SAMPLING).items() if key not in ("json_schema",)}
        return {"model": "m", "messages": messages, **_renamed(asked), **self._some(CHAT_FIELDS, 4)}

    def _speculation(self) -> Any:
        fields = self._some(SPECULATION, 3)
        preset = self._random.choice(sorted(OF_PRESETS))
        mine = {key: self._chosen(PRESET_KEYS[key]) for key in OF_PRESETS[preset] if self._often(0.8)}
        fields |= {"preset": preset, **mine}
        if self._often(0.1):
            fields |= self._some(PRESET_KEYS, 2)
        return fields

    def _spoil(self, fields: dict[str, Any]) -> None:
        """Put something wrong at a key, or below it."""
        key = self._random.choice(sorted(fields))
        inner = fields[key]
        if isinstance(inner, dict) and inner and self._often(0.7):
            fields[key] = inner = dict(inner)
            self._spoil(inner)
        else:
            fields[key] = self._random.choice(WRONG)


def _escaped(word: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}"\\' else letter for letter in word if letter not in "\x00\n")


def _renamed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters under their names in OpenAI's requests."""
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    other = {names.get(key, key): value for key, value in asked.items() if key != "structural_tag"}
    if "structural_tag" in asked:
        other["response_format"] = json.loads(asked["structural_tag"])
    return other


GRAMMARS: dict[str, Callable[[Draw], Any]] = {
    "regex": Draw.pattern,
    "json_schema": lambda draw: json.dumps(draw.schema(), ensure_ascii=False),
    "ebnf": Draw.ebnf,
    "structural_tag": lambda draw: json.dumps(draw.tags(), ensure_ascii=False),
}
SAMPLING: dict[str, Values] = {
    "temperature": (0, 0.0, 0.7, 1, 3.5, 9),
    "top_k": (-1, 1, 5, 300),
    "top_p": (1.0, 0.3, 1e-6),
    "min_p": (0.0, 0.5, 1.0),
    "frequency_penalty": (0.5, -2, 2),
    "presence_penalty": (1.5, -2),
    "repetition_penalty": (0.1, 1.3, 2),
    "min_new_tokens": (0, 1, 5, 30),
    "logit_bias": (Draw.biases,),
    "stop": (Draw.word, Draw.words, []),
    "stop_token_ids": (Draw.ids, [], [1]),
    "stop_regex": (Draw.pattern, "[а-я]+$"),
    "sampling_seed": (0, 7, -1, 2**63 - 1),
    "n": (1, 2, 3),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True,),
    "stream_interval": (1, 4),
    "custom_params": ({}, {"a": 1}, {"dspark": '{"max_verify": 1}'}, {"dspark": {}}, {"dspark": "{"}),
}
FIELDS: dict[str, Values] = {
    "return_logprob": (True, False),
    "logprob_start_len": (-1, 0, 2, 10**6),
    "top_logprobs_num": (0, 1, 5, -1, 300),
    "token_ids_logprob": ([3, 7, 250], [0], [], [VOCABULARY]),
    "return_text_in_logprobs": (True,),
    "return_entropy": (True,),
    "return_prompt_token_ids": (True,),
    "priority": (3, -3),
    "extra_key": (Draw.word,),
    "cache_salt": (Draw.word,),
    "rid": (lambda draw: "r" + draw.word(),),  # ending one request ends all whose names begin with its name
    "session_id": (Draw.word,),
    "routing_key": (Draw.word,),
    "require_reasoning": (True,),
    "custom_labels": ({"a": "б"},),
    "no_logs": (True,),
}
SESSIONS = ("s0", "s1", "s2", "s3", "s4", "s5")
"""Of :mod:`fuzz.traffic`; every second one streams."""
TURN: dict[str, Values] = {
    "rid": (lambda draw: "r" + draw.word(),),
    "offset": (0, 2, -1, 10**6),
    "replace": (True,),
    "drop_previous_output": (True,),
}
DOORS: dict[str, Values] = {
    "session_params": (Draw.turn,),
    "rid": FIELDS["rid"],
    "require_reasoning": (True,),
    "max_thinking_tokens": (0, 1, 3, -1, 2**62),
    "return_hidden_states": (True, "last"),
}
REFUSED: dict[str, Values] = {
    "return_sampling_mask": (True,),
    "return_hidden_states": (True, "last"),
    "max_thinking_tokens": (3,),
    "lora_path": ("none",),
    "custom_logit_processor": ("{}",),
    "image_data": ("да",),
}
COMPLETION_FIELDS: dict[str, Values] = {
    "echo": (True,),
    "logprobs": (0, 1, 5, 300),
    "suffix": ("да",),
    "best_of": (1, 2),
    "stream_options": ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "return_token_ids": (True,),
    "return_spec_tokens_details": (True,),
    "response_format": (Draw.response_format,),
    "user": (Draw.word,),
    "priority": (1,),
}
CHAT_FIELDS: dict[str, Values] = {
    "logprobs": (True,),
    "top_logprobs": (0, 3, 300),
    "response_format": (Draw.response_format,),
    "tools": (Draw.tools,),
    "tool_choice": ("auto", "required", "none", {"type": "function", "function": {"name": "сохранить"}}),
    "parallel_tool_calls": (False,),
    "stream_options": ({"include_usage": True},),
    "continue_final_message": (True,),
    "separate_reasoning": (True, False),
    "stream_reasoning": (False,),
    "reasoning_effort": ("none", "high"),
    "chat_template_kwargs": ({"enable_thinking": True}, {"thinking": False}),
    "return_meta_info": (True,),
    "return_spec_tokens_details": (True,),
    "return_token_ids": (True,),
    "return_prompt_token_ids": (True,),
    "max_completion_tokens": (5, 30),
    "input_ids": (Draw.ids,),
}
SPECULATION: dict[str, Values] = {
    "enabled": (True, False),
    "max_verify": (0, 1, 3, 15, 65535),
    "confidence_threshold": (0, 0.3, 0.9, 1),
    "trace": (True,),
    "tpot_ms": (0.1, 7, 10_000),
    "weight": (0.01, 0.5, 1),
}
PRESET_KEYS: dict[str, Values] = {
    "min_ngram": (1, 2, 8),
    "max_ngram": (1, 5, 8),
    "max_draft": (1, 2, 15, 65535),
    "candidates": (Draw.words, lambda draw: draw.words() * 60),
    "prediction": (Draw.prediction,),
    "cache": ("a", "ключ", Draw.word),
}
OF_PRESETS = {
    "auto": ("cache", "prediction"),
    "none": (),
    "summarization": ("min_ngram", "max_ngram", "max_draft", "cache"),
    "classification": ("candidates", "max_draft"),
}
