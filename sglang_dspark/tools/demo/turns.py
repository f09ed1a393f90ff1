"""Sends the same prompts to two servers, in turns over three ways of decoding."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from sglang_dspark.tools.cpu_time import CpuTime
from sglang_dspark.tools.demo.questioner import Answer, Questioner
from sglang_dspark.tools.launch import LaunchedServer

SEED = 0
WARM_UP_TOKENS = 8
"""Length of the answer that is thrown away before each one that counts."""


@dataclass(frozen=True)
class Mode:
    """A way of decoding that is compared.

    Attributes:
        name: what tables call it.
        policy: the server with DSPARK is switched to it before each answer; None: the server without the plugin.
    """

    name: str
    policy: str | None


PLAIN = Mode("plain SGLang", None)
OFF = Mode("plugin, off", "off")
AUTO = Mode("plugin, auto", "auto")
MODES = (PLAIN, OFF, AUTO)


@dataclass(frozen=True)
class Turn:
    """One question.

    Attributes:
        round: counted from 0; in each, all modes answer all prompts.
        prompt: its index.
    """

    round: int
    prompt: int
    mode: Mode


@dataclass(frozen=True)
class Measured:
    """One answer that counts, and the CPU time that programs other than server and demo took meanwhile (seconds)."""

    turn: Turn
    answer: Answer
    others_s: float


def schedule(num_prompts: int, num_rounds: int, seed: int = SEED) -> list[list[Turn]]:
    """The turns of every round in their order.

    The modes answer a prompt right after one another, so that drift of the machine meets them alike. Prompts within a
    round and modes within a prompt are shuffled: a fixed order would let each mode follow the same other one always.
    """
    shuffle = random.Random(seed)
    return [
        [
            Turn(index, prompt, mode)
            for prompt in shuffle.sample(range(num_prompts), num_prompts)
            for mode in shuffle.sample(MODES, len(MODES))
        ]
        for index in range(num_rounds)
    ]


class Contest:
    """The turns on running servers. Between its turns a server is suspended: an idle one may take the other's cores.

    Args:
        plain, dspark: both suspended already.
        chat: whether prompts go through the target's chat template.
    """

    def __init__(
        self, plain: LaunchedServer, dspark: LaunchedServer, prompts: Sequence[str], max_tokens: int, *, chat: bool
    ) -> None:
        self._prompts, self._max_tokens = prompts, max_tokens
        on_plain = (plain, Questioner(plain, chat=chat, speculative=False))
        on_dspark = (dspark, Questioner(dspark, chat=chat, speculative=True))
        self._asked: Mapping[Mode, tuple[LaunchedServer, Questioner]] = {
            mode: on_plain if mode.policy is None else on_dspark for mode in MODES
        }

    def ask(self, turn: Turn) -> Measured:
        """Wake the server of the mode, throw one answer away, and measure the one to the turn's prompt.

        Raises:
            openai.OpenAIError: the server refused a prompt or has died.
            urllib.error.URLError: it did not take its policy, or could not empty its cache.
        """
        server, questioner = self._asked[turn.mode]
        server.resume()
        if turn.mode.policy is not None:
            server.post_json("/dspark/policy", {"policy": turn.mode.policy})
        questioner.warm_up(WARM_UP_TOKENS)
        before = CpuTime.read(server.pid)
        answer = questioner.ask(self._prompts[turn.prompt], self._max_tokens)
        used = CpuTime.read(server.pid) - before
        server.suspend()
        return Measured(turn, answer, used.others_s)


def share_of_others(measured: Sequence[Measured]) -> float:
    """Share of the machine's cores that other programs took while answers were measured, 0 to 1."""
    seconds = sum(m.answer.seconds for m in measured)
    return max(0.0, sum(m.others_s for m in measured)) / (seconds * (psutil.cpu_count() or 1))
