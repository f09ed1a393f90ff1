"""Writers of texts: transformers' ``generate`` in this process, or an SGLang server. Both take and give token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from dspark_training.target import Target
from dspark_training.texts import Text
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.launch import JsonClient

_TIMEOUT_S = 1800.0


class TextWriter(Protocol):
    """Lets the target continue prompts.

    Attributes:
        stop_ids: token ids that end an answer.
        batch: prompts that are best given at a time.
    """

    stop_ids: frozenset[int]
    batch: int

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_new_tokens: int, seed: int
    ) -> list[Text]:
        """Continue every prompt until a stop token, which is kept, or `max_new_tokens`.

        Args:
            prompts: token ids.
            temperatures: one per prompt, 0 = greedy; the whole vocabulary is drawn from.
            seed: of all draws.
        """


class InProcessWriter:
    """The target in this process: for small targets, and for the few texts of an evaluation.

    Args:
        batch: prompts that are continued together.
        on_progress: called with the number of texts that were written since the last call.
    """

    def __init__(
        self, target: Target, *, batch: int = 64, on_progress: Callable[[float], None] = lambda num_texts: None
    ) -> None:
        self._target, self._on_progress = target, on_progress
        self.stop_ids, self.batch = target.stop_ids, batch

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_new_tokens: int, seed: int
    ) -> list[Text]:
        """See `TextWriter.write`."""
        device = self._target.device
        texts: dict[int, Text] = {}
        # Rows of one temperature and of similar length go together.
        order = sorted(range(len(prompts)), key=lambda i: (temperatures[i], len(prompts[i])))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            while order:
                together = [i for i in order[: self.batch] if temperatures[i] == temperatures[order[0]]]
                order = order[len(together) :]
                written = self._generate([prompts[i] for i in together], temperatures[together[0]], max_new_tokens)
                texts |= zip(together, written, strict=True)
                self._on_progress(len(together))
        return [texts[i] for i in range(len(prompts))]

    def _generate(self, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int) -> list[Text]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self._target.model.generate(
            input_ids=ids.to(self._target.device),
            attention_mask=mask.to(self._target.device),
            max_new_tokens=max_new_tokens,
            **sampling,
        ).cpu()
        texts = []
        for prompt, answer in zip(prompts, output[:, width:].tolist(), strict=True):
            stop = next((i for i, token in enumerate(answer) if token in self.stop_ids), len(answer))
            texts.append(Text(torch.tensor([*prompt, *answer[: stop + 1]]), len(prompt)))
        return texts


class ServerWriter:
    """An SGLang server, with or without speculation, that is asked by ``POST /generate``.

    Each sampled text carries a seed of its own. This plugin heeds it, and plain SGLang does with
    --enable-deterministic-inference; otherwise texts differ from one run to the next.

    Args:
        url: base URL.
        stop_ids: token ids that end an answer.
        vocab_size: ids from there on are not the target's.
        concurrency: requests at a time.
        api_key: the server's ``--api-key``.
    """

    def __init__(
        self, url: str, stop_ids: frozenset[int], vocab_size: int, *, concurrency: int, api_key: str | None = None
    ) -> None:
        self._client = JsonClient("--server", url.rstrip("/"), "an SGLang", _TIMEOUT_S, api_key)
        self._vocab_size, self._concurrency = vocab_size, concurrency
        # The larger the batch, the smaller the share of the time in which the last answers keep the server half idle.
        self.stop_ids, self.batch = stop_ids, 8 * concurrency

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_new_tokens: int, seed: int
    ) -> list[Text]:
        """See `TextWriter.write`.

        Raises:
            ConfigError: no server answers, or the answers are not token ids of the target.
            DSparkError: the server refused a prompt; the others are not sent.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = [
                pool.submit(self._ask, list(prompt), temperature, max_new_tokens, (seed * 1_000_003 + i) % 2**31)
                for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
            ]
            try:
                outputs = [answer.result() for answer in answers]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [
            Text(torch.tensor([*prompt, *output]), len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _ask(self, prompt: list[int], temperature: float, max_new_tokens: int, seed: int) -> list[int]:
        # Everything that shapes the distribution is given, so that no default of the server's model applies.
        parameters: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        parameters |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": sorted(self.stop_ids)}
        if temperature > 0:
            parameters["sampling_seed"] = seed
        answer = self._client.request("/generate", {"input_ids": prompt, "sampling_params": parameters})
        output = answer.get("output_ids")
        if not output or not all(isinstance(token, int) and 0 <= token < self._vocab_size for token in output):
            raise ConfigError(
                f"--server {self._client.url}: the answer {str(output)[:60]} is not a list of token ids below the "
                f"target's vocab_size={self._vocab_size}; check that the server serves the --target"
            )
        # Some versions cut the stop token off.
        stop = (answer["meta_info"].get("finish_reason") or {}).get("matched")
        return output if stop not in self.stop_ids or output[-1] == stop else [*output, stop]
