"""Accept length of a drafter on texts that the target has already written, without running the target again.

At temperature 0 the committed tokens are the target's own greedy text, so decoding is replayed along that text: draft
at the anchor, count the drafts that agree, move on. At temperature 1 the accepted prefix is drawn given a text y that
was sampled from the target: speculative sampling accepts y_k with probability ``min(1, p_d(y_k) / p_t(y_k))`` when the
text went through y_k, and the text itself supplies the correction or bonus token. Both replays have exactly the
distribution of the real decoding loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dspark_kernels import MarkovWalk, competing_columns
from torch import Tensor

from dspark_training.block_forward import block_hidden, context_kv
from dspark_training.target import Target, TargetStates
from dspark_training.texts import Text, states_of
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads

# Texts replayed together, and their tokens, padding included.
_BATCH_ROWS = 64
_BATCH_TOKENS = 65_536


@dataclass(frozen=True)
class AcceptanceReport:
    """Pooled over all rounds of all texts."""

    num_texts: int
    num_rounds: int
    num_committed: int
    survival: tuple[float, ...]  # [gamma] share of rounds that accepted at least k + 1 drafts

    @property
    def accept_length(self) -> float:
        """Return the mean committed tokens per round, correction or bonus token included."""
        return self.num_committed / max(self.num_rounds, 1)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Return the acceptance at each position given that all before it were accepted."""
        before = (1.0, *self.survival[:-1])
        return tuple(now / then if then else 0.0 for now, then in zip(self.survival, before, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content, accept length and conditional acceptance included."""
        return vars(self) | {"accept_length": self.accept_length, "conditional": self.conditional}


@torch.no_grad()
def replay(
    model: DraftModel,
    target: Target,
    texts: Sequence[Text],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    token_ids: Sequence[int] | None = None,
    use_markov: bool = True,
) -> AcceptanceReport:
    """Replay speculative decoding with `model` along `texts`.

    Args:
        model: bound to the target's embedding and LM head, in the dtype to judge.
        texts: answers written by the target at this same temperature, 0 or 1.
        temperature: 0 compares argmaxes, 1 draws acceptances.
        max_new_tokens: no round starts at or after this many answer tokens.
        token_ids: the tokens that are proposed, ascending; None proposes all, as a drafter without a
            ``draft_vocabulary.json`` does.
        use_markov: False leaves out the Markov head, to see what it is worth.
    """
    heads = ProposalHeads(model, token_ids)
    if not use_markov:
        heads.weights = replace(heads.weights, markov=None)
    generator = torch.Generator().manual_seed(seed)
    histogram = torch.zeros(model.config.gamma + 1, dtype=torch.long)
    num_committed = 0
    for batch in _batches(texts):
        rounds = _Rounds(model, heads, target, batch, states_of(target, batch), temperature, generator)
        while (accepted := rounds.advance(max_new_tokens)) is not None:
            histogram += torch.bincount(accepted, minlength=len(histogram))
        num_committed += rounds.num_committed
    num_rounds = int(histogram.sum())
    at_least = histogram.flip(0).cumsum(0).flip(0)[1:]
    return AcceptanceReport(len(texts), num_rounds, num_committed, tuple((at_least / max(num_rounds, 1)).tolist()))


def _batches(texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
    """Yield ``texts`` in their order, in batches that memory is bounded for."""
    start, longest = 0, 0
    for end, text in enumerate(texts):
        longest = max(longest, len(text.input_ids))
        rows = end + 1 - start
        if rows > 1 and (rows > _BATCH_ROWS or rows * longest > _BATCH_TOKENS):
            yield texts[start:end]
            start, longest = end, len(text.input_ids)
    if start < len(texts):
        yield texts[start:]


class _Rounds:
    """The rounds of one batch of texts, all texts at a time."""

    def __init__(
        self,
        model: DraftModel,
        heads: ProposalHeads,
        target: Target,
        texts: Sequence[Text],
        states: TargetStates,
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        weight = model.fc.weight
        self._model, self._heads, self._target, self._texts = model, heads, target, texts
        self._temperature, self._generator = temperature, generator
        self._k_ctx, self._v_ctx = context_kv(model, states.features.to(weight.device, weight.dtype))
        self._last_hidden = states.last_hidden
        self._device = weight.device
        # The first answer token comes from prefill and is the first anchor.
        self._anchors = torch.tensor([text.prompt_len for text in texts])
        self._ends = torch.tensor([len(text.input_ids) - 1 for text in texts])
        self.num_committed = 0

    def advance(self, max_new_tokens: int) -> Tensor | None:
        """Run one round of every text that is not at its end: accepted drafts ``[n]``, None when all are."""
        limits = torch.tensor([text.prompt_len + max_new_tokens for text in self._texts]).minimum(self._ends)
        rows = (self._anchors < limits).nonzero().flatten()
        if not len(rows):
            return None
        anchors, on_device = self._anchors[rows], rows.to(self._device)
        ids = torch.stack([self._texts[row].input_ids[self._anchors[row]] for row in rows.tolist()]).to(self._device)
        hidden = block_hidden(
            self._model,
            self._k_ctx[:, on_device],
            self._v_ctx[:, on_device],
            anchors.to(self._device)[:, None],
            ids[:, None],
        )[:, 0]
        accepted = self._accepted(rows, hidden, ids)
        # After the accepted tokens comes the correction or bonus; an accepted stop token ends the text without one.
        moved = torch.minimum(anchors + accepted + 1, self._ends[rows])
        self.num_committed += int((moved - anchors).sum())
        self._anchors[rows] = moved
        return accepted

    def _accepted(self, rows: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return accepted drafts ``[n]`` of blocks with ``hidden [n, gamma, d]`` after anchors ``ids [n]``."""
        positions = self._anchors[rows][:, None] + torch.arange(1, self._model.config.gamma + 1)  # [n, gamma]
        ends = self._ends[rows][:, None]
        inside, positions = positions <= ends, positions.minimum(ends)
        labels = torch.stack([self._texts[row].input_ids[at] for row, at in zip(rows.tolist(), positions, strict=True)])
        if self._temperature == 0:
            agrees = _draft_greedy(self._heads, hidden, ids).cpu() == labels
        else:
            p_draft = _label_probs(self._heads, hidden, ids, labels.to(self._device)).cpu()
            source = self._last_hidden.device
            before = self._last_hidden[rows.to(source)[:, None], (positions - 1).to(source)]
            logits = self._target.logits(before.to(self._target.device, self._target.dtype))
            p_target = torch.softmax(logits, dim=-1).cpu().gather(-1, labels[..., None])[..., 0]
            agrees = torch.rand(labels.shape, generator=self._generator) < p_draft / p_target
        return (agrees & inside).long().cumprod(-1).sum(-1)


def _draft_greedy(heads: ProposalHeads, hidden: Tensor, anchor_ids: Tensor) -> Tensor:
    """Return the drafts ``[n, gamma]`` of blocks with ``hidden [n, gamma, d]``."""
    drafts = [anchor_ids]
    for logits in _walk(heads, hidden, drafts):
        choice = logits.argmax(-1)
        drafts.append(choice if heads.vocabulary is None else heads.vocabulary.token_ids[choice])
    return torch.stack(drafts[1:], dim=1)


def _label_probs(heads: ProposalHeads, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor:
    """Return draft probabilities ``[n, gamma]`` of `labels`, each given those before it; 0 if not proposed."""
    probs = []
    for slot, logits in enumerate(_walk(heads, hidden, [anchor_ids, *labels.unbind(1)])):
        whole = logits if heads.vocabulary is None else heads.vocabulary.spread(logits)
        probs.append(torch.softmax(whole.float(), dim=-1).gather(-1, labels[:, slot, None])[:, 0])
    return torch.stack(probs, dim=1)


def _walk(heads: ProposalHeads, hidden: Tensor, tokens: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield logits ``[n, v]`` slot by slot, each given ``tokens[slot]``, which may be added while the walk goes on."""
    base_logits = heads.base_logits(hidden)
    if heads.weights.markov is None:
        yield from base_logits.unbind(1)
        return
    walk, competing = MarkovWalk(heads.weights.markov, hidden), competing_columns(base_logits, heads.weights)
    for slot in range(hidden.shape[1]):
        listed = None if competing is None else competing[:, slot]
        yield walk.corrected(tokens[slot], base_logits[:, slot], listed)
