"""Write a file of prompts for a training corpus that needs no data set: filled templates, and user turns of the target.

    python training/examples/smollm2/make_prompts.py --target TARGET --output prompts.jsonl --invented 4000

Three domains are covered alike: word problems, small Python functions and chat. A turn that the target writes itself
begins with an opening out of ``seed_prompts.json``. A seed names the file, as far as the target's arithmetic repeats.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from dspark_training.corpus import invent_prompts
from dspark_training.prompt_format import PromptFormat
from dspark_training.target import Target
from dspark_training.writers import InProcessWriter

SEEDS: dict[str, Any] = json.loads((Path(__file__).parent / "seed_prompts.json").read_text(encoding="utf-8"))
DOMAINS = ("math", "code", "chat")
MAX_TOKENS = 128
BATCH = 256


def fillers(rng: random.Random) -> dict[str, object]:
    """Draw a word or number for each name in braces."""
    a, b, c = rng.sample(SEEDS["names"], 3)
    t, t2 = rng.sample(SEEDS["topics"], 2)
    drawn = {name: rng.choice(choices) for name, choices in SEEDS["fillers"].items()}
    return {"a": a, "b": b, "c": c, "t": t, "t2": t2} | drawn


def templated(domain: str, rng: random.Random) -> str:
    """Fill a template of a domain."""
    template = rng.choice(SEEDS["templates"][domain])
    if domain == "code":
        task = rng.choice(SEEDS["functions"])
        doc = "{text}\n    >>> {call}\n    {result}".format(**task)
        return template.format(
            stub='def {name}({arguments}) -> {returns}:\n    """ '.format(**task) + doc + '\n    """'
        )
    ending = rng.choice(SEEDS["math_endings"]) if domain == "math" else ""
    return template.format(**fillers(rng)) + ending


def openings(number: int, rng: random.Random) -> list[str]:
    """Draw first words of user turns, the domains in turn."""
    patterns = [SEEDS["openings"][DOMAINS[i % len(DOMAINS)]] for i in range(number)]
    return [rng.choice(choices).format(**fillers(rng)) for choices in patterns]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--templated", type=int, default=2000)
    parser.add_argument("--invented", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    prompts = [templated(DOMAINS[i % len(DOMAINS)], rng) for i in range(options.templated)]
    if options.invented:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = Target.from_pretrained(options.target, (0,), dtype=torch.bfloat16, device=device)
        writer, prompt_format = InProcessWriter(target, batch=BATCH), PromptFormat.from_pretrained(options.target)
        wanted = openings(options.invented, rng)
        for start in range(0, len(wanted), BATCH):
            part = wanted[start : start + BATCH]
            prompts += invent_prompts(writer, prompt_format, part, MAX_TOKENS, 1.0, options.seed + start)
            print(f"{min(start + BATCH, len(wanted))} of {len(wanted)} openings", flush=True)
    distinct = list(dict.fromkeys(prompts))
    options.output.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in distinct), encoding="utf-8")


if __name__ == "__main__":
    main()
