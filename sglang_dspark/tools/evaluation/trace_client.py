"""Ask a running DSPARK server and keep the traces of its rounds."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.hub import checkpoint_name
from sglang_dspark.tools.http_client import JsonClient

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
        """Return the output tokens but for the last, which no round follows."""
        rounds = [entry for entry in self.trace if entry is not None]
        return [token for one in rounds for token in (one["anchor"], *one["draft"][: one["accepted"]])]


@dataclass(frozen=True)
class TraceClient:
    """The request parameters of all prompts.

    Attributes:
        url: base URL, without a trailing slash.
        max_tokens: length limit of an answer.
        temperature: 0 = greedy.
        raw: send the text as it is (``/generate``) instead of through the chat template.
        chat_template_kwargs: further arguments of the chat template, such as ``{"enable_thinking": False}``.
        api_key: the server's ``--api-key``, None where it has none.
    """

    url: str
    max_tokens: int
    temperature: float
    raw: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    def pair(self) -> tuple[str, str]:
        """Return ``(target, draft)``: the names of what is served, wherever it lies.

        Raises:
            ConfigError: the server does not answer, or the server does not decode with DSPARK.
        """
        info = self._request("/server_info")
        if info.get("speculative_algorithm") not in ("DSPARK", "DSPARK_PLUGIN"):
            raise ConfigError(
                f"--url {self.url}: the server runs with --speculative-algorithm {info.get('speculative_algorithm')}; "
                "start it with --speculative-algorithm DSPARK"
            )
        return checkpoint_name(info["model_path"]), checkpoint_name(info["speculative_draft_model_path"])

    def block_size(self) -> int:
        """Return the number of drafts per block of the server.

        Raises:
            ConfigError: the server does not answer, or its blocks are longer than the drafter's.
        """
        served = self._request("/dspark/capabilities")
        size, drafter = int(served["block_size"]), served["drafter"]
        if drafter is not None and size > drafter["block_size"]:
            raise ConfigError(
                f"--url {self.url}: a block has {size} drafts, and those behind the first {drafter['block_size']} are "
                "copied, not the drafter's; start the server without --speculative-dspark-block-size"
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
                f"--url {self.url}: no answer has a dspark_trace; serve with the sglang-dspark plugin and give "
                "--max-tokens above 1"
            )
        return done

    def _ask(self, prompt: str) -> Answer:
        # What is measured, and calibrated, is the drafter.
        options = {"speculation": {"trace": True, "preset": "none"}}
        if self.raw:
            parameters = {"max_new_tokens": self.max_tokens, "temperature": self.temperature}
            answer = self._request("/generate", {"text": prompt, "sampling_params": parameters, **options})
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
            answer = self._request("/v1/chat/completions", body)["choices"][0]
        meta = answer["meta_info"]
        stopped = (meta.get("finish_reason") or {}).get("type") == "stop"
        return Answer(meta.get("dspark_trace") or [], meta.get("completion_tokens", 0), stopped)

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return JsonClient("--url", self.url, "a DSPARK", TIMEOUT_S, self.api_key).request(path, body)
