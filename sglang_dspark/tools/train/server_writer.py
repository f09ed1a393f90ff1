"""Texts written by an SGLang server, with or without speculation: token ids go in, token ids come out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.http_client import JsonClient
from sglang_dspark.tools.launch import CPU_DEVICE_FLAGS, CPU_ENV, LaunchedServer
from sglang_dspark.tools.train.rows import CorpusRow

TIMEOUT_S = 1800.0
# Of a server of our own, which may have to fetch the target from the hub first.
STARTUP_TIMEOUT_S = 7200.0


class ServerWriter:
    """A `TextWriter` that asks ``POST /generate``.

    Each sampled text carries a seed of its own; whether the server heeds it is the server's affair (this plugin does,
    plain SGLang with --enable-deterministic-inference), so a corpus may differ from one run to the next.

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
        self._client = JsonClient("--server", url.rstrip("/"), "an SGLang", TIMEOUT_S, api_key)
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._concurrency = concurrency

    @property
    def stop_ids(self) -> frozenset[int]:
        """See `TextWriter.stop_ids`."""
        return self._stop_ids

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[CorpusRow]:
        """See `TextWriter.write`.

        Raises:
            ConfigError: nobody answers, or the answers are not token ids of the target.
            DSparkError: the server refused a prompt; the others are not sent.
        """
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = [
                pool.submit(self._ask, list(prompt), heat, max_new_tokens, seed)
                for prompt, heat, seed in zip(prompts, temperatures, seeds, strict=True)
            ]
            try:
                outputs = [answer.result() for answer in answers]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [
            CorpusRow(torch.tensor([*prompt, *output]), len(prompt))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _ask(self, prompt: list[int], temperature: float, max_new_tokens: int, seed: int) -> list[int]:
        # Everything that shapes the distribution is said, so that no default of the server's model applies.
        parameters: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        parameters |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": sorted(self._stop_ids)}
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
        return output if stop not in self._stop_ids or output[-1] == stop else [*output, stop]


class OwnServerWriter:
    """A `ServerWriter` with a server of its own, which starts with the first text and stops with the ``with`` block.

    Args:
        target: checkpoint folder, or name on the Hugging Face hub.
        device: that serves, ``cuda``, ``cuda:1`` or ``cpu``.
        dtype: name of the dtype that it serves in.
        stop_ids, vocab_size, concurrency: as those of `ServerWriter`.
    """

    def __init__(
        self, target: str, device: str, dtype: str, stop_ids: frozenset[int], vocab_size: int, concurrency: int
    ) -> None:
        kind, _, index = device.partition(":")
        flags = CPU_DEVICE_FLAGS if kind == "cpu" else ("--base-gpu-id", index or "0")
        env = CPU_ENV if kind == "cpu" else {}
        self._server = LaunchedServer(target, *flags, "--dtype", dtype, env=env, startup_timeout_s=STARTUP_TIMEOUT_S)
        self._stop_ids, self._vocab_size, self._concurrency = stop_ids, vocab_size, concurrency
        self._open = ExitStack()
        self._writer: ServerWriter | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """See `TextWriter.stop_ids`."""
        return self._stop_ids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._writer = None

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[CorpusRow]:
        """See `ServerWriter.write`.

        Raises:
            LaunchError: the server did not start.
        """
        if self._writer is None:
            url = self._open.enter_context(self._server).url
            self._writer = ServerWriter(url, self._stop_ids, self._vocab_size, concurrency=self._concurrency)
        return self._writer.write(prompts, temperatures, max_new_tokens, generator)
