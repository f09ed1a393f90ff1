"""Traces of rounds of a running server, and what they say of a drafter. Definitions are those of DeepSpec."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.hub import checkpoint_name
from sglang_dspark.scheduling.sts import Bools, Floats, Ints, errors, prefix_survival, sigmoid, survived
from sglang_dspark.tools.launch import JsonClient
from sglang_dspark.tools.simulator.workload import RecordedBlocks

TIMEOUT_S = 600.0

Trace = Sequence[dict[str, Any] | None]
"""``meta_info["dspark_trace"]`` of an answer: one entry per output token, a round or null."""


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        trace: its decode rounds.
        num_tokens: output tokens, as the server counts them.
        stopped: whether a stop token ended it, not its length.
    """

    trace: Trace
    num_tokens: int
    stopped: bool

    @property
    def tokens(self) -> list[int]:
        """Return the output tokens except the last, which no round follows."""
        rounds = [entry for entry in self.trace if entry is not None]
        return [token for one in rounds for token in (one["anchor"], *one["draft"][: one["accepted"]])]


@dataclass(frozen=True)
class TraceClient:
    """The request parameters of all prompts.

    Attributes:
        server: to ask.
        max_tokens: length limit of an answer.
        temperature: 0 = greedy.
        raw: send the text as it is (``/generate``) instead of through the chat template.
        chat_template_kwargs: further arguments of the chat template, such as ``{"enable_thinking": False}``.
    """

    server: JsonClient
    max_tokens: int
    temperature: float
    raw: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def pair(self) -> tuple[str, str]:
        """Return ``(target, draft)``: the names of what is served, wherever it lies.

        Raises:
            ConfigError: the server does not answer, or the server does not decode with DSPARK.
        """
        info = self.server.request("/server_info")
        if info.get("speculative_algorithm") not in ("DSPARK", "DSPARK_PLUGIN"):
            raise ConfigError(
                f"--url {self.server.url}: the server runs with --speculative-algorithm "
                f"{info.get('speculative_algorithm')}; start it with --speculative-algorithm DSPARK"
            )
        return checkpoint_name(info["model_path"]), checkpoint_name(info["speculative_draft_model_path"])

    def block_size(self) -> int:
        """Return the number of drafts per block of the server.

        Raises:
            ConfigError: the server does not answer, or its blocks are longer than the drafter's.
        """
        served = self.server.request("/dspark/capabilities")
        size, drafter = int(served["block_size"]), served["drafter"]
        if drafter is not None and size > drafter["block_size"]:
            raise ConfigError(
                f"--url {self.server.url}: a block has {size} drafts, and those after the first "
                f"{drafter['block_size']} are copied, not the drafter's; start the server without "
                "--speculative-dspark-block-size"
            )
        return size

    def ask_all(self, prompts: Sequence[str], concurrency: int, on_answer: Callable[[], None]) -> list[Answer]:
        """Return the answers with their traces, in the order of the prompts.

        Args:
            concurrency: requests at a time.
            on_answer: called after every answer.

        Raises:
            ConfigError: the server does not answer, or no answer has a trace.
            DSparkError: the server refused a prompt; the others are not sent.
        """
        with ThreadPoolExecutor(concurrency) as pool:
            answers = [pool.submit(self._ask, prompt) for prompt in prompts]
            try:
                for answer in as_completed(answers):
                    answer.result()
                    on_answer()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        done = [answer.result() for answer in answers]
        # An answer that ends with its first token has no rounds, and then no trace either.
        if not any(answer.trace for answer in done):
            raise ConfigError(
                f"--url {self.server.url}: no answer has a dspark_trace; serve with the sglang-dspark plugin and give "
                "--max-tokens above 1"
            )
        return done

    def _ask(self, prompt: str) -> Answer:
        # What is measured, and calibrated, is the drafter.
        options = {"speculation": {"trace": True, "preset": "none"}}
        if self.raw:
            parameters = {"max_new_tokens": self.max_tokens, "temperature": self.temperature}
            answer = self.server.request("/generate", {"text": prompt, "sampling_params": parameters, **options})
        else:
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "return_meta_info": True,
                **options,
            }
            if self.chat_template_kwargs:
                body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
            answer = self.server.request("/v1/chat/completions", body)["choices"][0]
        meta = answer["meta_info"]
        stopped = (meta.get("finish_reason") or {}).get("type") == "stop"
        return Answer(meta.get("dspark_trace") or [], meta.get("completion_tokens", 0), stopped)


@dataclass(frozen=True)
class MeasuredSet:
    """The rounds of the answers to a set of prompts, each of which verified its whole block.

    A round in which a stop token was accepted counts its drafts up to that token, and no bonus token.

    Attributes:
        name: of the set.
        num_answers: prompts asked.
        num_tokens: output tokens of all answers.
        proposed: [n] drafts of each round: the block, or the drafts up to an accepted stop token.
        accepted: [n] drafts accepted.
        committed: [n] tokens gained: accepted drafts and, unless they stopped, one more.
        logits: [n, gamma] raw logits of the confidence head; None without one.
        answer: [n] index of the answer.
    """

    name: str
    num_answers: int
    num_tokens: int
    gamma: int
    proposed: Ints
    accepted: Ints
    committed: Ints
    logits: Floats | None
    answer: Ints

    @classmethod
    def from_answers(cls, name: str, answers: Sequence[Answer], gamma: int) -> Self:
        """Collect the rounds.

        Args:
            gamma: drafts of a whole block.

        Raises:
            ConfigError: there are none, or some were verified in part.
        """
        rounds = [
            (index, position, entry)
            for index, answer in enumerate(answers)
            for position, entry in enumerate(answer.trace)
            if entry
        ]
        cut = sum(entry["verified"] < gamma for _, _, entry in rounds)
        if not rounds:
            raise ConfigError(
                f"{name}: every answer ended with its first token; give other prompts or more --max-tokens"
            )
        if cut:
            raise ConfigError(
                f"{name}: {cut} of {len(rounds)} rounds did not verify a whole block of drafts, so that the "
                "figures are the schedule's as much as the drafter's; start the server with "
                "--speculative-dspark-schedule static and without --speculative-dspark-verify-len, or switch it with "
                'POST /dspark/policy {"policy": "static"}'
            )
        has_head = all(entry.get("confidence") is not None for _, _, entry in rounds)
        counts = np.array([_counts(answers[index], position, entry, gamma) for index, position, entry in rounds])
        return cls(
            name,
            len(answers),
            sum(answer.num_tokens for answer in answers),
            gamma,
            proposed=counts[:, 0],
            accepted=counts[:, 1],
            committed=counts[:, 2],
            logits=np.array([entry["confidence"] for _, _, entry in rounds]) if has_head else None,
            answer=np.array([index for index, _, _ in rounds]),
        )

    @property
    def accept_length(self) -> float:
        """Return the mean tokens committed per round, bonus included."""
        return float(self.committed.mean())

    @property
    def standard_error(self) -> float:
        """Return that of the accept length over the answers: rounds of one answer resemble each other.

        The accept length is a ratio of sums over answers; this is the linearised error of such a ratio.
        """
        count = self.num_answers
        committed = np.bincount(self.answer, self.committed, count)
        rounds = np.bincount(self.answer, minlength=count)
        residual = committed - self.accept_length * rounds
        return float(np.sqrt(np.square(residual).sum() * count / max(count - 1, 1)) / rounds.sum())

    @property
    def verify_rate(self) -> float:
        """Return the tokens committed per token that went through the target."""
        return float(self.committed.sum() / (self.proposed + 1).sum())

    @property
    def outcomes(self) -> Bools:
        """Return [n, gamma] whether a draft and all before it were accepted."""
        return survived(self.accepted, self.gamma)

    @property
    def survival(self) -> list[float]:
        """Return by position the share of rounds that proposed it in which it and all before it were accepted."""
        proposed = self.proposed[:, None] > np.arange(self.gamma)
        return _shares((self.outcomes & proposed).sum(0), proposed.sum(0))

    @property
    def conditional(self) -> list[float]:
        """Return by position the share accepted of the drafts before which all were accepted."""
        tested = np.minimum(self.proposed, self.accepted + 1)[:, None] > np.arange(self.gamma)
        return _shares(self.outcomes.sum(0), tested.sum(0))

    def held_out(self, share: float) -> Bools:
        """Return [n] whether a round is held out: those of whole answers, evenly spread, always the same ones.

        Rounds of one answer resemble each other, so a split within an answer would test on what was fitted.

        Args:
            share: of the answers to hold out, between 0 and 1.

        Raises:
            ConfigError: one of the parts has no rounds.
        """
        quota = np.floor(np.arange(self.num_answers + 1) * share)
        held_out: Bools = (np.diff(quota) > 0)[self.answer]
        for part, rounds in (("fit", ~held_out), ("held-out", held_out)):
            if not rounds.any():
                raise ConfigError(
                    f"--held-out {share:g} of {self.num_answers} prompts leaves no round in the {part} part; give more "
                    "prompts or another share"
                )
        return held_out

    def confidence(self) -> list[dict[str, float | None]]:
        """Return the errors of the raw head's survival by position; empty without one."""
        if self.logits is None:
            return []
        survival = prefix_survival(sigmoid(self.logits))
        rows: list[dict[str, float | None]] = []
        for k, (predicted, observed) in enumerate(zip(survival.T, self.outcomes.T, strict=True)):
            asked = self.proposed > k
            means = {"predicted_mean": predicted[asked].mean(), "observed_mean": observed[asked].mean()}
            found = asdict(errors(predicted[asked], observed[asked])) | {name: float(m) for name, m in means.items()}
            rows.append({"position": k + 1, **found})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        return {
            "set": self.name,
            "answers": self.num_answers,
            "output_tokens": self.num_tokens,
            "rounds": len(self.accepted),
            "block_size": self.gamma,
            "accept_length": self.accept_length,
            "standard_error": self.standard_error,
            "verify_rate": self.verify_rate,
            "survival": self.survival,
            "conditional": self.conditional,
            "confidence": self.confidence(),
        }


def _counts(answer: Answer, position: int, entry: dict[str, Any], gamma: int) -> tuple[int, int, int]:
    """Return drafts proposed and accepted, and tokens committed, of the round that begins at an output token."""
    accepted = int(entry["accepted"])
    given = answer.num_tokens - position
    if answer.stopped and given <= accepted:
        return given, given, given  # the last token given is a draft, and a stop token
    return gamma, accepted, accepted + 1


def _shares(part: Ints, whole: Ints) -> list[float]:
    shares: list[float] = (part / np.maximum(whole, 1)).tolist()
    return shares


def recorded_blocks(sets: Sequence[MeasuredSet], name: str) -> RecordedBlocks:
    """Return the rounds of all sets, answers in turn, for the simulator.

    Rounds that ended with a stop token are left out: what the block was worth is not known of them.
    """
    gamma = sets[0].gamma
    whole = [(one, one.proposed == gamma) for one in sets]
    # The first answers of all sets, then the second ones ...: a short workload shall have something of each.
    owners = np.concatenate([one.answer[kept] * len(sets) + index for index, (one, kept) in enumerate(whole)])
    order = owners.argsort(kind="stable")
    accepted = np.concatenate([one.accepted[kept] for one, kept in whole])[order]
    found = [one.logits[kept] for one, kept in whole if one.logits is not None]
    logits = np.concatenate(found)[order] if len(found) == len(sets) else None
    return RecordedBlocks(gamma, accepted, logits, owners[order], name)
