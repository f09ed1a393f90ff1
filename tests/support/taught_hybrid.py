"""A tiny target with gated delta nets that has learned to spell: what a drafter can learn from it, too."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from byte_tokenizer import save_byte_tokenizer
from family_targets import COMMON, TINY
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

_ADJECTIVES = "small quiet yellow broken distant friendly".split()
_NOUNS = "elephant river carpenter window mountain umbrella".split()
_VERBS = "watches follows remembers answers".split()
_STEPS, _ROWS, _LENGTH = 400, 16, 64


def sentence(draw: random.Random) -> str:
    """Return one of some thousand sentences: where a word begins it is a guess, and then it is not."""
    words = (draw.choice(part) for part in (_ADJECTIVES, _NOUNS, _VERBS, _ADJECTIVES, _NOUNS))
    return "the {} {} {} the {} {}. ".format(*words)


def taught_hybrid(folder: Path) -> Path:
    """Teach a target the sentences, for a minute of a core, and write it and its tokenizer; returns ``folder``."""
    save_byte_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    draw = random.Random(0)
    ids = torch.tensor(tokenizer("".join(sentence(draw) for _ in range(2000)))["input_ids"])
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**COMMON, **TINY["Qwen3_5ForCausalLM"].config}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=_STEPS, pct_start=0.1)
    for _ in range(_STEPS):
        begins = torch.randint(len(ids) - _LENGTH, (_ROWS, 1))
        rows = ids[begins + torch.arange(_LENGTH)]
        model(rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
