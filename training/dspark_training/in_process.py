"""Accept length of a drafter without a server: along texts that the target writes in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark_training.prompt_format import PromptFormat
from dspark_training.replay import replay
from dspark_training.target import Target
from dspark_training.texts import keep_states
from dspark_training.writers import InProcessWriter
from sglang_dspark.draft.config import check_dimensions
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import ResolvedDrafter, load_draft_model

# Tokens that go through the target together.
_BATCH_TOKENS = 16_384


def evaluate_in_process(  # noqa: PLR0913 - each is an option of the command
    target_path: Path,
    draft_path: Path,
    sets: Mapping[str, Sequence[str]],
    *,
    temperature: int,
    max_tokens: int,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    listed: Path | None = None,
    eight_bits: bool = False,
    on_written: Callable[[float], None] = lambda texts: None,
    on_measured: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure a drafter set by set: as it is served, without its Markov head, and proposing all tokens.

    On a GPU in bfloat16, else in float32.

    Args:
        sets: name -> prompts.
        temperature: 0 or 1.
        max_tokens: no round starts at or after this many tokens of an answer.
        chat_template_kwargs: further arguments of the target's chat template.
        listed: file of the tokens that are proposed, in place of the drafter's own.
        eight_bits: measure it with layers and heads in eight bits, too.
        on_written: called while the target writes, with the answers written since the last call; parts count.
        on_measured: called when a set has been replayed in all ways.

    Raises:
        CheckpointError: the drafter was made for another target, or cannot propose what is listed.
    """
    from transformers import AutoConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    drafter = ResolvedDrafter.read(draft_path)
    token_ids = (drafter if listed is None else drafter.proposing(listed)).token_ids
    check_dimensions(drafter.config, AutoConfig.from_pretrained(target_path).get_text_config())
    target = Target.from_pretrained(target_path, drafter.config.target_layer_ids, dtype=dtype, device=device)

    def loaded() -> DraftModel:
        model = load_draft_model(draft_path, dtype=dtype, device=device, reading=drafter.reading)
        model.bind_target(target.embed_weight, target.lm_head_weight, embed_scale=target.embed_scale)
        return model

    model = loaded()
    prompt_format = PromptFormat.from_pretrained(target_path, raw=raw, template_kwargs=chat_template_kwargs)
    writer = InProcessWriter(target, on_progress=on_written)
    has_markov = model.markov_head is not None
    ways = [(model, token_ids, has_markov)]
    ways += [(model, token_ids, False)] if has_markov else []
    ways += [(model, None, has_markov)] if token_ids is not None else []
    if eight_bits:
        rounded = loaded().store_in_eight_bits()
        ways += [(rounded, proposed, with_markov) for _, proposed, with_markov in ways if with_markov == has_markov]
    results = []
    for name, prompts in sets.items():
        ids = [prompt_format.encode(prompt) for prompt in prompts]
        # A block and a bonus token past the limit, to judge the last round in full.
        texts = writer.write(ids, [temperature] * len(ids), max_tokens + model.config.gamma + 1, seed)
        # Of one set at a time: states take kilobytes per token.
        stored = keep_states(target, texts, batch_tokens=_BATCH_TOKENS)
        for measured, proposed, use_markov in ways:
            report = replay(
                measured,
                target,
                stored,
                temperature=temperature,
                max_new_tokens=max_tokens,
                seed=seed,
                token_ids=proposed,
                use_markov=use_markov,
            )
            result: dict[str, Any] = {"set": name, "temperature": temperature, "markov": use_markov}
            result["proposed_tokens"] = target.vocab_size if proposed is None else len(proposed)
            result["quantization"] = "int8" if measured.eight_bits else None
            results.append(result | report.to_dict())
        del stored
        on_measured()
    return results
