"""Accept length of a drafter on sets of prompts, measured in the ways that explain it.

Per set, greedy and at temperature 1: as it is served, without the Markov head, and with all tokens proposed where it
proposes a part of them; and how much of the greedy text is a loop, which any drafter predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.tools.train.evaluate import loop_start, replay, write_texts
from sglang_dspark.tools.train.rows import CorpusRow, keep_states, stored_states
from sglang_dspark.tools.train.target import Target
from sglang_dspark.tools.train.text_writer import TextWriter

# Tokens that go through the target together.
_BATCH_TOKENS = 16_384


def measured_texts(
    target: Target,
    writer: TextWriter,
    sets: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    block_size: int,
    seed: int,
) -> dict[tuple[str, int], list[CorpusRow]]:
    """(set, temperature) -> the target's answers with their states, for `measure`.

    Args:
        sets: name -> token ids of the prompts.
        block_size: the largest of the drafters to be measured.
    """
    prompts = [ids for chosen in sets.values() for ids in chosen]
    texts = {}
    for temperature in (0, 1):
        rows = write_texts(
            writer,
            prompts,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            block_size=block_size,
            batch_size=len(prompts),
            seed=seed,
        )
        stored = iter(keep_states(target, rows, batch_tokens=_BATCH_TOKENS))
        for name, chosen in sets.items():
            texts[name, temperature] = [next(stored) for _ in chosen]
    return texts


def measure(
    model: DraftModel,
    token_ids: Sequence[int] | None,
    target: Target,
    texts: Mapping[tuple[str, int], Sequence[CorpusRow]],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """JSON-ready results, per set and temperature the drafter as it is served first.

    Args:
        model: bound to the target's embedding and LM head, in the dtype to judge.
        token_ids: what the drafter proposes; None = all tokens.
        texts: of `measured_texts`.
    """
    has_markov = model.markov_head is not None
    ways: list[tuple[Sequence[int] | None, bool]] = [(token_ids, has_markov)]
    if has_markov:
        ways.append((token_ids, False))
    if token_ids is not None:
        ways.append((None, has_markov))
    results = []
    for ((name, temperature), rows), (ids, use_markov) in product(texts.items(), ways):
        judge = partial(
            replay,
            model,
            target,
            states=stored_states,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            token_ids=ids,
            use_markov=use_markov,
        )
        result: dict[str, Any] = {
            "set": name,
            "temperature": temperature,
            "proposed_tokens": model.config.vocab_size if ids is None else len(ids),
            "markov": use_markov,
        }
        result |= judge(texts=rows).to_dict()
        if temperature == 0 and (ids, use_markov) == ways[0]:
            answers = [row.input_ids[row.prompt_len : row.prompt_len + max_new_tokens].tolist() for row in rows]
            starts = [loop_start(answer) for answer in answers]
            straight = [row for row, start in zip(rows, starts, strict=True) if start is None]
            looped = sum(len(a) - start for a, start in zip(answers, starts, strict=True) if start is not None)
            result["loops"] = {
                "texts": 1 - len(straight) / len(rows),
                "tokens": looped / sum(map(len, answers)),
                "accept_length_of_other_texts": judge(texts=straight).accept_length if straight else None,
            }
        results.append(result)
    return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results of `measure` as Markdown."""
    lines = [
        "| set | temperature | proposes | Markov | accept length | survival | given all before | looping texts; rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        survival, conditional = (
            " ".join(f"{rate:.3f}".lstrip("0") for rate in r[name]) for name in ("survival", "conditional")
        )
        loops = r.get("loops")
        said = ""
        if loops:
            other = loops["accept_length_of_other_texts"]
            said = f"{loops['texts']:.0%}; {'-' if other is None else format(other, '.2f')}"
        lines.append(
            f"| {r['set']} | {r['temperature']} | {r['proposed_tokens']} | {'on' if r['markov'] else 'off'} | "
            f"{r['accept_length']:.3f} | {survival} | {conditional} | {said} |"
        )
    return "\n".join(lines) + "\n"
