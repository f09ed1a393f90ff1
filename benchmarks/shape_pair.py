r"""A target and a drafter of a production shape without weights, to measure how long their steps take.

    python benchmarks/shape_pair.py --shape qwen3-8b --output PAIR
    python benchmarks/sweep_concurrency.py --target PAIR/target --draft PAIR/draft --device cuda --ignore-eos \
        --server-flags "--load-format dummy" --config plain \
        --config "auto=auto SGLANG_DSPARK_SIMULATE_ACCEPTANCE=0.842,0.833,0.829,0.83,0.834,0.839,0.831" ...

PAIR holds configurations and a tokenizer, some megabytes; SGLang gives both models random weights (``--load-format
dummy``), and drafts are kept at random, the same ones by our worker and by SGLang's own. Times and loads are then those
of the shape, and texts are noise. Results are step-time results. The tokenizer takes a text as its bytes, about four
times as many tokens as Qwen3's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from sglang_dspark.draft.config import DraftConfig

_PUBLISHED = {
    "math": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    "code": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
}
ACCEPTANCE = {**_PUBLISHED, "mixed": tuple(round(fmean(rates), 3) for rates in zip(*_PUBLISHED.values(), strict=True))}
"""Acceptance by position, given all before, of the released drafter of Qwen3-4B at temperature 1 (DSpark, Fig. 2)."""

END, MASK = "<|end|>", "<|mask|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 target and of its drafter; by default those of Qwen3-8B, as released."""

    hidden_size: int = 4096
    intermediate_size: int = 12_288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    tie_word_embeddings: bool = False
    target_layer_ids: tuple[int, ...] = (1, 9, 17, 25, 33)
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    draft_layers: int = 5
    block_size: int = 7
    markov_rank: int = 256

    @property
    def _shared(self) -> dict[str, Any]:
        """Return the sizes that target and drafter share."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        sizes = {name: getattr(self, name) for name in (*names, "vocab_size")}
        return {**sizes, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6}

    def target_config(self) -> Qwen3Config:
        """Return the target's configuration, in the form of transformers."""
        return Qwen3Config(
            **self._shared,
            architectures=["Qwen3ForCausalLM"],
            num_hidden_layers=self.num_hidden_layers,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=self.tie_word_embeddings,
            eos_token_id=self.vocab_size - 2,
            dtype="bfloat16",
        )

    def draft_config(self) -> DraftConfig:
        """Return the drafter's configuration."""
        return DraftConfig(
            **self._shared,
            num_hidden_layers=self.draft_layers,
            rope_theta=1e6,
            block_size=self.block_size,
            mask_token_id=self.vocab_size - 1,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=self.num_hidden_layers,
            markov_rank=self.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            num_anchors=512,
        )


SHAPES: Mapping[str, Shape] = {
    # For rehearsals on a CPU.
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1000,
        tie_word_embeddings=True,
        target_layer_ids=(0, 2),
        draft_layers=2,
        markov_rank=16,
    ),
    "qwen3-8b": Shape(),
}


def write_pair(shape: Shape, folder: Path) -> None:
    """Write ``folder/target`` and ``folder/draft``."""
    target, draft = folder / "target", folder / "draft"
    shape.target_config().save_pretrained(target)
    _tokenizer(shape.vocab_size).save_pretrained(target)
    draft.mkdir(parents=True, exist_ok=True)
    content = shape.draft_config().to_dict() | {"dtype": "bfloat16"}
    (draft / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_prompts(path: Path, length: int, number: int = 128) -> None:
    """Write prompts of so many tokens, letters, no two alike: none finds another one's prefix in the cache."""
    rng = random.Random(length)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for _ in range(number)]
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes, then words of digits, which clients do not send, and two special ids."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"Ġ{number}" for number in range(len(tokens), vocab_size - 2)]
    tokens += [END, MASK]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, MASK])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, mask_token=MASK)
    fast.chat_template = CHAT_TEMPLATE
    return fast


@click.command(help="Make a target and a drafter of a production shape without weights, to measure their step times.")
@click.option("--shape", required=True, type=click.Choice(sorted(SHAPES)))
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(1), help="Write prompts of so many tokens, too."
)
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the pair.")
def main(**options: Any) -> None:
    """Run the command line; see the module."""
    write_pair(SHAPES[options["shape"]], options["output"])
    for length in options["contexts"]:
        write_prompts(options["output"] / f"context_{length}.jsonl", length)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"wrote {options['output']}/target and {options['output']}/draft; serve them with --load-format dummy"
    )
    for traffic, profile in ACCEPTANCE.items():
        console.print(f"{traffic}: SGLANG_DSPARK_SIMULATE_ACCEPTANCE={','.join(map(str, profile))}")


if __name__ == "__main__":
    main()
