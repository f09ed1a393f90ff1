r"""What a drafter loses that proposes a few leading tokens only: accept length by the number of tokens in its support.

    python benchmarks/draft_support.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS.json

Any support is exact when the law that drafts are drawn from is the one that verification divides by. Where the tokens
of a slot are known before the walk through the Markov head begins, that walk needs the rows of W2 of these tokens only,
and one launch could take a whole block. A support that costs one reading of the base logits: the vocabulary is cut into
strided tiles (token t belongs to tile t mod K), and the best token of each tile by the base logits is in it. A token
that the Markov head would have lifted is lost where a better one shares its tile.

No server: blocks are drafted along texts that the target writes in this process, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.nn.functional as F
from dspark_training.prompt_format import PromptFormat
from dspark_training.replay import replay
from dspark_training.target import Target
from dspark_training.texts import keep_states, stored_states
from dspark_training.writers import InProcessWriter
from rich.console import Console
from rich.table import Table
from serving.prompts import load_mixed_prompts

from sglang_dspark.draft.reduced_vocabulary import ProposalHeads, load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools import provenance

_BATCH_TOKENS = 16_384  # that go through the target together


def leading_of_tiles(logits: torch.Tensor, tiles: int) -> torch.Tensor:
    """``logits`` [..., v] with minus infinity for every token that is not the best of its strided tile."""
    v = logits.shape[-1]
    padded = F.pad(logits, (0, -v % tiles), value=float("-inf")).unflatten(-1, (-1, tiles))
    best = padded.max(-2, keepdim=True)
    kept = torch.full_like(padded, float("-inf")).scatter_(-2, best.indices, best.values)
    return kept.flatten(-2)[..., :v]


@contextmanager
def _restricted(tiles: int | None) -> Iterator[None]:
    """Drafters propose the leading tokens of so many tiles inside; None: every token."""
    whole = ProposalHeads.base_logits

    def base_logits(heads: ProposalHeads, hidden: torch.Tensor) -> torch.Tensor:
        return leading_of_tiles(whole(heads, hidden), tiles) if tiles else whole(heads, hidden)

    with patch.object(ProposalHeads, "base_logits", base_logits):
        yield


def measure(
    target_path: Path, draft_path: Path, prompts: Sequence[str], supports: Sequence[int], max_tokens: int
) -> list[dict[str, Any]]:
    """Accept lengths, bonus token included, by temperature, vocabulary of the drafter and size of the support."""
    model = load_draft_model(draft_path, dtype=torch.float32, device="cpu")
    target = Target.from_pretrained(target_path, model.config.target_layer_ids, dtype=torch.float32, device="cpu")
    model.bind_target(target.embed_weight, target.lm_head_weight)
    prompt_format, writer = PromptFormat.from_pretrained(target_path), InProcessWriter(target)
    token_ids = load_token_ids(draft_path, target.vocab_size)
    records = []
    for temperature in (0, 1):
        ids = [prompt_format.encode(prompt) for prompt in prompts]
        # A block and a bonus token past the limit, to judge the last round in full.
        rows = writer.write(ids, [temperature] * len(ids), max_tokens + model.config.gamma + 1, seed=0)
        texts = keep_states(target, rows, batch_tokens=_BATCH_TOKENS)
        for ids in [None] if token_ids is None else [None, token_ids]:
            for tiles in (None, *supports):
                with _restricted(tiles):
                    found = replay(
                        model,
                        target,
                        states=stored_states,
                        texts=texts,
                        temperature=temperature,
                        max_new_tokens=max_tokens,
                        seed=0,
                        token_ids=ids,
                    )
                records.append(
                    {
                        "temperature": temperature,
                        "proposed_tokens": model.config.vocab_size if ids is None else len(ids),
                        "support": tiles,
                        "accept_length": round(found.accept_length, 4),
                    }
                )
    return records


@click.command(help="Accept length of a drafter that proposes the leading tokens of strided tiles only.")
@click.option("--target", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--draft", required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--prompts", "files", required=True, multiple=True, type=click.Path(path_type=Path), help="JSONL; in turn."
)
@click.option("--num-prompts", default=48, show_default=True)
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--supports", default="2048,1024,512,256,128", show_default=True, help="Tokens per slot.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(
    target: Path, draft: Path, files: tuple[Path, ...], num_prompts: int, max_tokens: int, supports: str, output: Path
) -> None:
    """Command line; see the module."""
    prompts = [prompt.text for prompt in load_mixed_prompts(files)[:num_prompts]]
    records = measure(target, draft, prompts, [int(number) for number in supports.split(",")], max_tokens)
    table = Table("temperature", "proposes", "support", "accept length")
    for record in records:
        table.add_row(*("all" if value is None else str(value) for value in record.values()))
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        source = {"target": target.name, "draft": draft.name, "prompts": [file.name for file in files]}
        document = {**provenance.record(), **source, "num_prompts": len(prompts), "max_tokens": max_tokens}
        provenance.write_json(output, document | {"accept_lengths": records})


if __name__ == "__main__":
    main()
