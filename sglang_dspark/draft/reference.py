"""Speculative decoding of one request, spelled out: slow, dense, no paging and no batching.

The yardstick for the worker, the kernels and the golden replay: context K/V, block draft and acceptance stand alone,
and :func:`decode_greedy` puts them together.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel

Target = Callable[[Sequence[int]], tuple[Tensor, Tensor]]
"""``target(ids) -> (logits [n, V], features [n, m * d])`` of all n tokens; taps ordered as ``target_layer_ids``."""


class ContextKV:
    """The draft's K/V of positions 0..length-1 of one request, in the order the target verified them."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.length = 0
        config, like = model.config, model.fc.weight
        self.k = like.new_empty(config.num_hidden_layers, 0, config.num_key_value_heads, config.head_dim)
        self.v = self.k

    def append(self, features: Tensor) -> None:
        """Project target features ``[n, m * d]`` of the next n positions and keep their K/V for good."""
        positions = torch.arange(self.length, self.length + features.shape[0], device=features.device)
        k, v = self.model.context_kv(self.model.project_context(features), positions)
        self.k, self.v = torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)
        self.length += features.shape[0]


@dataclass(frozen=True)
class DraftBlock:
    """One drafted block of g tokens and everything it was computed from."""

    tokens: list[int]
    hidden: Tensor  # [g, d] after the final norm
    base_logits: Tensor  # [g, V] before the Markov bias
    logits: Tensor  # [g, V] after it; what each token was chosen from
    confidence_logits: Tensor | None  # [g] float32; None without a confidence head


def attend_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention, no mask: ``q [T, heads, hd]``, ``k, v [S, kv_heads, hd]`` -> ``[T, heads, hd]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v)


def choose_greedy(logits: Tensor) -> int:
    """``[V]`` -> the first index of the largest logit."""
    return int(logits.argmax())


@torch.no_grad()
def draft_block(
    model: DraftModel, context: ContextKV, anchor: int, choose: Callable[[Tensor], int] = choose_greedy
) -> DraftBlock:
    """Draft gamma tokens after ``anchor``, which stands at position ``context.length``.

    The anchor's own target features are not in the context: the target has not seen it yet. ``choose`` draws a token
    from corrected logits ``[V]``.
    """
    gamma, device = model.config.block_size, context.k.device
    ids = torch.tensor([anchor] + [model.config.mask_token_id] * (gamma - 1), device=device)
    positions = torch.arange(context.length, context.length + gamma, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_dense(q, torch.cat((context.k[layer], k)), torch.cat((context.v[layer], v)))

    hidden = model.forward_block(model.embed(ids), positions, attend)
    base_logits = model.base_logits(hidden)
    state = model.markov.initial_state(1, device, hidden.dtype) if model.markov is not None else None
    tokens: list[int] = []
    logits, confidences = [], []
    for slot in range(gamma):
        prev_token = torch.tensor([tokens[-1] if tokens else anchor], device=device)
        slot_logits, w1_embedding = base_logits[slot], None
        if model.markov is not None:
            bias, w1_embedding, state = model.markov.step(prev_token, hidden[slot : slot + 1], state)
            slot_logits = slot_logits + bias[0]
        if model.confidence is not None:
            confidences.append(model.confidence(hidden[slot : slot + 1], w1_embedding))
        logits.append(slot_logits)
        tokens.append(choose(slot_logits))
    return DraftBlock(tokens, hidden, base_logits, torch.stack(logits), torch.cat(confidences) if confidences else None)


@dataclass(frozen=True)
class Round:
    """One draft-and-verify round."""

    start: int  # absolute position of the anchor
    anchor: int
    block: DraftBlock
    accepted: int


@dataclass(frozen=True)
class Decoded:
    """A finished request."""

    output_ids: list[int]  # at most max_new_tokens, a stop token included
    rounds: list[Round]
    accept_length: float  # mean committed tokens per round, bonus included; nan without rounds


@torch.no_grad()
def accept_greedy(
    target_logits: Tensor, draft: Sequence[int], stop_token_ids: Collection[int] = ()
) -> tuple[int, int | None]:
    """Longest prefix of ``draft`` that the target would have chosen itself.

    Args:
        target_logits: ``[len(draft) + 1, V]`` after the anchor and after each draft.
        draft: the tokens to verify.
        stop_token_ids: an accepted one of these ends the round: what follows it is not accepted, and no bonus is drawn.

    Returns:
        ``(accepted, correction or bonus token)``; the token is None when the round ended in a stop token.
    """
    for accepted, token in enumerate(draft):
        choice = choose_greedy(target_logits[accepted])
        if choice != token:
            return accepted, choice
        if token in stop_token_ids:
            return accepted + 1, None
    return len(draft), choose_greedy(target_logits[len(draft)])


@torch.no_grad()
def decode_greedy(
    model: DraftModel,
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> Decoded:
    """Decode one request at temperature 0; the target is re-run over the whole sequence every round."""
    limit = len(prompt_ids) + max_new_tokens
    logits, features = target(prompt_ids)
    context = ContextKV(model)
    context.append(features)
    ids = [*prompt_ids, choose_greedy(logits[-1])]
    rounds: list[Round] = []
    committed = 0
    while context.length < limit and ids[-1] not in stop_token_ids:
        start = context.length
        block = draft_block(model, context, ids[start])
        logits, features = target([*ids, *block.tokens])
        accepted, next_token = accept_greedy(logits[start:], block.tokens, stop_token_ids)
        rounds.append(Round(start, ids[start], block, accepted))
        new_ids = block.tokens[:accepted] + ([] if next_token is None else [next_token])
        ids += new_ids
        committed += len(new_ids)
        context.append(features[start : start + accepted + 1])
    accept_length = committed / len(rounds) if rounds else float("nan")
    return Decoded(ids[len(prompt_ids) : limit], rounds, accept_length)
