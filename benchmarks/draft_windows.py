r"""Measure what a window on the context costs a drafter in accept length and gains in speed, by the context's length.

    python benchmarks/draft_windows.py --target T --draft D --prompts FILE --output RESULTS/draft_windows.csv

Servers without a window and with each one are asked the same questions in turn, which all stand behind one document:
texts of the prompt files, one after another, of the wanted length. What is measured begins with the first token: a step
is a chunk of the stream. Beside the table, ``provenance.json`` is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import pandas as pd
from paired_ratio import paired_ratios, ratio_table, summarise
from rich.console import Console
from serving.client import Sampling, ask_all
from serving.prompts import Prompt, load_mixed_prompts
from transformers import AutoTokenizer

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, CUDA_MEMORY_FLAGS, LaunchedServer, dspark_flags

WHOLE = "whole context"


def questions(tokenizer: Any, texts: Sequence[str], context: int, number: int) -> list[Prompt]:
    """Return so many questions, each behind the same document of ``context`` tokens."""
    asked, read = texts[:number], cycle(texts[number:])
    ids: list[int] = []
    while len(ids) < context:
        ids += tokenizer.encode("\n\n".join(islice(read, 20)) + "\n\n", add_special_tokens=False)
    document = tokenizer.decode(ids[:context])
    return [Prompt(index, f"{document}\n\n{text}") for index, text in enumerate(asked)]


def measure(server: LaunchedServer, prompt: Prompt, sampling: Sampling) -> dict[str, float]:
    """Return the figures of the decoding of one answer."""
    [reply] = ask_all(server.url, [prompt], sampling)
    seconds, steps, tokens = reply.total_s - reply.ttft_s, len(reply.chunks_s) - 1, reply.num_tokens - 1
    return {"accept_length": tokens / steps, "step_ms": 1e3 * seconds / steps, "tok_s": tokens / seconds}


def measurements(
    servers: Mapping[str, LaunchedServer], prompts: Mapping[int, Sequence[Prompt]], sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Ask all servers a question before the next one, and begin with another server every time."""
    names = list(servers)
    for context, asked in prompts.items():
        for prompt in asked:
            first = prompt.index % len(names)
            for name in (*names[first:], *names[:first]):
                cell = {"config": name, "load": context, "round": prompt.index}
                yield cell | measure(servers[name], prompt, sampling)


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--context", "contexts", type=int, multiple=True, default=(1000, 2000, 4000), show_default=True)
@click.option("--window", "windows", type=int, multiple=True, default=(256, 1024), show_default=True)
@click.option("--num-prompts", default=8, show_default=True)
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    target: Path,
    draft: Path,
    files: tuple[Path, ...],
    contexts: tuple[int, ...],
    windows: tuple[int, ...],
    num_prompts: int,
    max_tokens: int,
    dtype: str,
    device: str,
    output: Path,
) -> None:
    """Command line; see the module."""
    console = Console()
    tokenizer, texts = AutoTokenizer.from_pretrained(target), [prompt.text for prompt in load_mixed_prompts(files)]
    prompts = {context: questions(tokenizer, texts, context, num_prompts) for context in contexts}
    device_flags, env = (CPU_FLAGS, CPU_ENV) if device == "cpu" else (CUDA_MEMORY_FLAGS, {})
    flags = (*device_flags, "--dtype", dtype, *dspark_flags(draft))
    sizes = {WHOLE: (), **{f"window {size}": ("--speculative-draft-window-size", str(size)) for size in windows}}
    output.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance.record() | {"dtype": dtype, "prompts": [file.name for file in files], "max_tokens": max_tokens}
    provenance.write_json(output.with_name("provenance.json"), origin)
    rows = []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(LaunchedServer(target, *flags, *size, env=env)) for name, size in sizes.items()
        }
        for row in measurements(servers, prompts, Sampling(max_tokens, temperature=0, ignore_eos=True)):
            rows.append(row)
            pd.DataFrame(rows).to_csv(output, index=False, float_format="%.6g")
    frame = pd.DataFrame(rows)
    for metric in ("accept_length", "step_ms", "tok_s"):
        ratios = paired_ratios(frame, metric, dict.fromkeys(sizes, WHOLE))
        console.print(ratio_table(summarise(ratios.assign(load=ratios["load"].map("{} tokens".format))), metric))


if __name__ == "__main__":
    main()
