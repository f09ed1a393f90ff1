"""Bodies that know what a request looks like, and get one or two things in it wrong."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
FEW_TOKENS = 8  # of an answer: what is looked for lies at the beginning
IDS = range(3, 60)
WORDS = ("red", "stone", "the", "large", "dog", ".", "\N{GRINNING FACE}", "\u2028", "speculation", "\\u0073", "")

# No large positive number: SGLang would really produce so many tokens or samples.
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, -(2**31), -(2**63), -(10**30), 0, 1, 0.5, -0.5, 1e-45, 1e39, 1e308),
    *(float("inf"), -float("inf"), float("nan"), "", "x", "1", "\0", "\ud800", "speculation", "\N{GRINNING FACE}" * 50),
    *([], {}, [1], [None], [[1]], {"a": 1}, {"": None}, ["a"] * 2000, {str(key): key for key in range(500)}),
)
LARGE: tuple[Any, ...] = (*ODD, 2**31, 2**63, 2**64, 10**30)
PROMPTS = ("prompt", "text", "input_ids", "messages")
COUNTS = ("n", "max_new_tokens", "max_tokens", "max_completion_tokens", "min_new_tokens", "min_tokens", "best_of")

PARAMETERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1.5, 1e-6),
    "top_p": (0.5, 0.95, 1.0),
    "top_k": (1, 5, -1, 2**31),
    "min_p": (0.0, 0.2),
    "frequency_penalty": (0.5, -0.5),
    "presence_penalty": (0.3,),
    "repetition_penalty": (1.2,),
    "min_new_tokens": (0, 2),
    "stop": ("stone", ["a", "b"]),
    "stop_token_ids": ([1], [5, 6], [2**40, -3]),
    "stop_regex": ("a+$",),
    "ignore_eos": (True,),
    "n": (1, 2, 3),
    "logit_bias": ({"5": 3.0}, {"7": -100.0}, {"5": 1e39}),
    "sampling_seed": (1, 2**31, 2**62),
    "skip_special_tokens": (False,),
    "stream_interval": (1, 3),
    "regex": ("[a-z ]{4,8}",),
    "json_schema": ('{"type": "object"}',),
    "custom_params": ({"mine": 1}, {"dspark": {"max_verify": 2}}, {"dspark_labels": [5, -1]}),
}
SPECULATION: dict[str, tuple[Any, ...]] = {
    "enabled": (True, False),
    "max_verify": (0, 1, 3, 65535),
    "confidence_threshold": (0.0, 0.5, 1.0),
    "preset": ("none", "summarization", "classification"),
    "min_ngram": (1, 3),
    "max_ngram": (5, 8),
    "max_draft": (1, 4),
    "candidates": (["red stone", "blue"], ["large stone finds the small"] * 3, ["a" * 200] * 150),
    "trace": (True, False),
}
FIELDS: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "return_logprob": (True,),
    "top_logprobs_num": (1, 3),
    "logprob_start_len": (0, -1),
    "token_ids_logprob": ([5, 6],),
    "return_hidden_states": (True,),
    "session_params": ({"id": "none"},),
    "lora_path": ("x",),
    "input_embeds": ([[0.5]],),
    "priority": (1,),
    # No beginning of an id that SGLang makes: it would end the neighbour's request, too, when this client leaves.
    "rid": ("mine", "yours"),
    "extra_key": ("k",),
}
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "auto"},
    {"policy": "static", "verify_len": 2},
    {"policy": "early-stop"},
    {"policy": "threshold", "confidence_threshold": 0.5},
    {"policy": "off"},
)
JSON_TYPES = ("application/json", "application/json; charset=utf-8", "application/json; charset=utf-16")
OTHER_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/octet-stream")


@dataclass(frozen=True)
class Sent:
    """A request.

    Attributes:
        kind: what is odd about it.
        leaves: whether the client goes away after the first byte of the answer.
    """

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    leaves: bool = False


class Bodies:
    """A sequence of requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: tuple[Callable[[], Sent], ...] = (
            *(self._request, self._request, self._odd_parameter, self._odd_parameter, self._odd_field),
            *(self._odd_speculation, self._odd_speculation, self._odd_speculation, self._speculation_of_nothing),
            *(self._odd_prompt, self._bytes, self._bytes, self._encoded, self._deep, self._twice, self._typed),
            *(self._leaving, self._question, self._policy),
        )

    def some(self, number: int) -> list[Sent]:
        """So many more."""
        return [self.next() for _ in range(number)]

    def next(self) -> Sent:
        """One more."""
        return self._random.choice(self._kinds)()

    def usual(self, number: int) -> list[Sent]:
        """So many in which nothing is odd."""
        return [self._request() for _ in range(number)]

    def _some(self, choices: dict[str, tuple[Any, ...]], most: int) -> dict[str, Any]:
        keys = self._random.sample(sorted(choices), self._random.randint(0, most))
        return {key: self._random.choice(choices[key]) for key in keys}

    def _document(self, path: str) -> dict[str, Any]:
        parameters = self._some(PARAMETERS, 3)
        if path == GENERATE:
            prompt: dict[str, Any] = {"input_ids": self._random.choices(IDS, k=self._random.choice((1, 5, 40)))}
            parameters["max_new_tokens"] = self._random.randint(1, FEW_TOKENS)
            return prompt | {"sampling_params": parameters} | self._some(FIELDS, 1) | self._field()
        text = " ".join(self._random.choices(WORDS, k=6)) or "a"
        chat = {"messages": [{"role": "user", "content": text}]}
        prompt = {"model": "m"} | ({"prompt": text} if path == COMPLETIONS else chat)
        return prompt | parameters | {"max_tokens": self._random.randint(1, FEW_TOKENS)} | self._field()

    def _field(self) -> dict[str, Any]:
        return {"speculation": self._some(SPECULATION, 3)} if self._random.random() < 0.5 else {}

    def _path(self) -> str:
        return self._random.choice((GENERATE, GENERATE, COMPLETIONS, CHAT))

    def _post(self, kind: str, path: str, body: bytes | dict[str, Any], **more: Any) -> Sent:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | more.pop("headers", {})
        return Sent(kind, "POST", path, data, headers, **more)

    def _request(self) -> Sent:
        path = self._path()
        return self._post("well-formed", path, self._document(path))

    def _odd(self, key: str) -> Any:
        return self._random.choice(ODD if key in COUNTS else LARGE)

    def _odd_parameter(self) -> Sent:
        path = self._path()
        document = self._document(path)
        holder = document["sampling_params"] if path == GENERATE else document
        key = self._random.choice([*PARAMETERS, "max_new_tokens", "max_tokens", "no_such_parameter"])
        holder[key] = self._odd(key)
        if self._random.random() < 0.1:
            document["sampling_params"] = self._random.choice(ODD)
        return self._post("odd sampling parameter", path, document)

    def _odd_field(self) -> Sent:
        path = self._path()
        document = self._document(path)
        key = self._random.choice([*FIELDS, *document, "no_such_field"])
        if key not in ("sampling_params", "max_tokens"):
            odd = self._odd(key)
            # Thousands of prompts are no odd request, but work.
            document[key] = odd[:3] if key in PROMPTS and isinstance(odd, list) else odd
        return self._post("odd field", path, document)

    def _odd_speculation(self) -> Sent:
        path = self._path()
        options = self._some(SPECULATION, 4)
        key = self._random.choice([*SPECULATION, "no_such_option", ""])
        options[key] = self._random.choice(LARGE)
        return self._post("odd option", path, self._document(path) | {"speculation": options})

    def _speculation_of_nothing(self) -> Sent:
        path = self._path()
        return self._post("odd speculation", path, self._document(path) | {"speculation": self._random.choice(LARGE)})

    def _odd_prompt(self) -> Sent:
        document = self._document(GENERATE)
        ids: tuple[Any, ...] = (
            [],
            [-1],
            [10**9],
            [2**40],
            ["a"],
            [[5, 6], [7]],
            [5] * 5000,
            "abc",
            [1.5],
            None,
            [True],
        )
        document["input_ids"] = self._random.choice(ids)
        if self._random.random() < 0.3:
            document["text"] = self._random.choice(["a", "", ["a", "b"], 3, "red " * 3000])
        return self._post("odd prompt", GENERATE, document)

    def _bytes(self) -> Sent:
        path = self._path()
        body = bytearray(json.dumps(self._document(path) | {"speculation": {"trace": True}}).encode())
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randrange(len(body))
            match self._random.randrange(4):
                case 0:
                    del body[place:]
                case 1:
                    body[place] = self._random.randrange(256)
                case 2:
                    body[place:place] = self._random.choice((b"\\u0000", b"\0", b"\xff", b"}{", b'"', b"[" * 50))
                case _:
                    del body[place : place + 3]
            if not body:
                break
        # What is left may ask for many samples or tokens by accident.
        return self._post("broken bytes", path, bytes(body).replace(b'"n"', b'"m"'))

    def _encoded(self) -> Sent:
        path = self._path()
        text = json.dumps(self._document(path) | {"speculation": {"max_verify": self._random.choice((-1, 2))}})
        match self._random.randrange(3):
            case 0:
                return self._post("encoding", path, text.encode(self._random.choice(("utf-16", "utf-32", "utf-8-sig"))))
            case 1:
                return self._post("escaped key", path, text.replace('"spec', '"\\u0073pec').encode())
            case _:
                return self._post("gzip", path, gzip.compress(text.encode()), headers={"Content-Encoding": "gzip"})

    def _deep(self) -> Sent:
        path, depth = self._path(), self._random.choice((50, 400, 500, 950, 1000, 5000, 50_000))
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}")))
        inner = opening * depth + ("1" if opening != "[" else "") + closing * depth
        key = self._random.choice(("speculation", "sampling_params", "custom_params", "x"))
        text = json.dumps(self._document(path))[:-1] + f', "{key}": {inner}, "speculation": {{"trace": true}}}}'
        return self._post("deep", path, text.encode())

    def _twice(self) -> Sent:
        path = self._path()
        first, second = (json.dumps(self._random.choice(({"trace": True}, {"max_verify": -1}, 3))) for _ in range(2))
        text = json.dumps(self._document(path))[:-1] + f', "speculation": {first}, "speculation": {second}}}'
        return self._post("key twice", path, text.encode())

    def _typed(self) -> Sent:
        path = self._path()
        kind = self._random.choice(JSON_TYPES + OTHER_TYPES)
        return self._post("content type", path, self._document(path), headers={"Content-Type": kind})

    def _leaving(self) -> Sent:
        document = self._document(GENERATE) | {"stream": True}
        document["sampling_params"]["max_new_tokens"] = 64
        return self._post("client leaves", GENERATE, document, leaves=True)

    def _question(self) -> Sent:
        paths = ("/dspark", "/dspark/stats", "/dspark/capabilities", "/dspark/stats?history_s=300", "/dspark/")
        odd = self._random.choice(("-1", "301", "x", "1e3", "", "%00", "5", "0"))
        path = self._random.choice((*paths, f"/dspark/stats?history_s={odd}", "//dspark/stats", "/dspark/policy"))
        return Sent("question", self._random.choice(("GET", "GET", "GET", "HEAD", "PUT")), path)

    def _policy(self) -> Sent:
        if self._random.random() < 0.3:
            return self._post("policy", "/dspark/policy", self._random.choice(POLICIES))
        depth = self._random.choice((3, 500, 50_000))
        bodies: tuple[bytes, ...] = (
            *(b"", b"null", b"[]", b"{", b"\xff", b'"\\ud800"', b'{"policy": ' + b"[" * depth + b"]" * depth + b"}"),
            *(json.dumps({"policy": odd}).encode() for odd in LARGE),
            *(json.dumps({"policy": "static", "verify_len": odd}).encode() for odd in LARGE),
            *(json.dumps({"policy": "threshold", "confidence_threshold": odd}).encode() for odd in LARGE),
            json.dumps({"policy": "auto", "x" * 5000: 1}).encode(),
        )
        kind = self._random.choice(JSON_TYPES[:2] + OTHER_TYPES[:1])
        return self._post("odd policy", "/dspark/policy", self._random.choice(bodies), headers={"Content-Type": kind})
