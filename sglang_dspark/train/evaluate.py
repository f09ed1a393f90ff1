"""Accept length of a drafter on texts that the target has already written, without running the target again.

At temperature 0 the committed tokens are the target's own greedy text, so decoding is replayed along that text: draft
at the anchor, count the drafts that agree, move on. At temperature 1 the accepted prefix is drawn given a text y that
was sampled from the target: speculative sampling accepts y_k with probability ``min(1, p_d(y_k) / p_t(y_k))`` when the
text went through y_k, and the text itself supplies the correction or bonus token. Both replays have exactly the law of
the real decoding loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.train.block_forward import block_hidden, context_kv
from sglang_dspark.train.corpus import CorpusRow, padded_features
from sglang_dspark.train.decoding import decode
from sglang_dspark.train.target import Target


@dataclass(frozen=True)
class AcceptanceReport:
    """Pooled over all rounds of all texts."""

    num_texts: int
    num_rounds: int
    num_committed: int
    survival: tuple[float, ...]  # [gamma] share of rounds that accepted at least k + 1 drafts

    @property
    def accept_length(self) -> float:
        """Mean committed tokens per round, correction or bonus token included."""
        return self.num_committed / max(self.num_rounds, 1)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Acceptance at each position given that all before it were accepted."""
        before = (1.0, *self.survival[:-1])
        return tuple(now / then if then else 0.0 for now, then in zip(self.survival, before, strict=True))


def write_texts(
    target: Target,
    prompts: Sequence[str],
    *,
    temperature: float,
    max_new_tokens: int,
    block_size: int,
    batch_size: int,
    seed: int,
) -> list[CorpusRow]:
    """Let the target answer `prompts`, a block and a bonus past `max_new_tokens`, to judge the last round in full."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for start in range(0, len(prompts), batch_size):
        ids = [target.chat_prompt(prompt) for prompt in prompts[start : start + batch_size]]
        rows = decode(target, ids, [temperature] * len(ids), max_new_tokens + block_size + 1, generator)
        texts += [
            CorpusRow(torch.tensor(r.prompt_ids + r.output_ids), len(r.prompt_ids), r.features, r.last_hidden)
            for r in rows
        ]
    return texts


@torch.no_grad()
def replay(
    model: DraftModel,
    target: Target,
    texts: Sequence[CorpusRow],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
) -> AcceptanceReport:
    """Replay speculative decoding with `model` along `texts`.

    Args:
        model: bound to the target's embedding and LM head, in the dtype to judge.
        texts: answers written by the target at this same temperature, 0 or 1.
        temperature: 0 compares argmaxes, 1 draws acceptances.
        max_new_tokens: no round starts at or after this many answer tokens.
    """
    gamma, device = model.config.block_size, model.fc.weight.device
    k_ctx, v_ctx = context_kv(model, padded_features(texts).to(device, model.fc.weight.dtype))
    generator = torch.Generator().manual_seed(seed)
    # The first answer token comes from prefill and is the first anchor.
    anchors = torch.tensor([text.prompt_len for text in texts])
    histogram = torch.zeros(gamma + 1, dtype=torch.long)
    num_committed = 0
    while True:
        limits = torch.tensor([min(len(t.input_ids) - 1, t.prompt_len + max_new_tokens) for t in texts])
        rows = (anchors < limits).nonzero().flatten()
        if not len(rows):
            break
        on_device = rows.to(device)
        ids = torch.stack([texts[row].input_ids[anchors[row]] for row in rows]).to(device)
        hidden = block_hidden(
            model, k_ctx[:, on_device], v_ctx[:, on_device], anchors[rows].to(device)[:, None], ids[:, None]
        )[:, 0]
        labels, inside, target_hidden = _after(texts, rows, anchors, gamma)
        if temperature == 0:
            agrees = _draft_greedy(model, hidden, ids).cpu() == labels
        else:
            p_draft = _label_probs(model, hidden, ids, labels.to(device)).cpu()
            p_target = torch.softmax(target.logits(target_hidden.to(target.device, target.dtype)), dim=-1)
            p_target = p_target.cpu().gather(-1, labels[..., None])[..., 0]
            agrees = torch.rand(labels.shape, generator=generator) < p_draft / p_target
        accepted = (agrees & inside).long().cumprod(-1).sum(-1)
        histogram += torch.bincount(accepted, minlength=gamma + 1)
        # After the accepted tokens comes the correction or bonus; an accepted stop token ends the text without one.
        ends = torch.tensor([len(texts[row].input_ids) - 1 for row in rows])
        moved = torch.minimum(anchors[rows] + accepted + 1, ends)
        num_committed += int((moved - anchors[rows]).sum())
        anchors[rows] = moved
    num_rounds = int(histogram.sum())
    at_least = histogram.flip(0).cumsum(0).flip(0)[1:]
    return AcceptanceReport(len(texts), num_rounds, num_committed, tuple((at_least / max(num_rounds, 1)).tolist()))


def _after(texts: Sequence[CorpusRow], rows: Tensor, anchors: Tensor, gamma: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(labels [n, gamma], inside [n, gamma], target_hidden [n, gamma, d])`` of the slots after each row's anchor."""
    labels, inside, hidden = [], [], []
    for row in rows.tolist():
        text = texts[row]
        positions = anchors[row] + torch.arange(1, gamma + 1)
        inside.append(positions < len(text.input_ids))
        positions = positions.clamp(max=len(text.input_ids) - 1)
        labels.append(text.input_ids[positions])
        hidden.append(text.last_hidden[positions - 1])
    return torch.stack(labels), torch.stack(inside), torch.stack(hidden)


def _draft_greedy(model: DraftModel, hidden: Tensor, anchor_ids: Tensor) -> Tensor:
    """The drafts ``[n, gamma]`` of blocks with ``hidden [n, gamma, d]``."""
    base_logits = model.base_logits(hidden)
    if model.markov is None:
        return base_logits.argmax(-1)
    state = model.markov.initial_state(len(hidden), hidden.device, hidden.dtype)
    drafts = [anchor_ids]
    for slot in range(hidden.shape[1]):
        bias, _, state = model.markov.step(drafts[-1], hidden[:, slot], state)
        drafts.append((base_logits[:, slot] + bias).argmax(-1))
    return torch.stack(drafts[1:], dim=1)


def _label_probs(model: DraftModel, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor:
    """Draft probabilities ``[n, gamma]`` of `labels`, each given the labels before it."""
    logits = model.base_logits(hidden).float()
    if model.markov is not None:
        logits = logits + model.markov.block_bias(torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1), hidden)
    return torch.softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0]
