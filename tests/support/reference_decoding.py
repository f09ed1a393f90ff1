"""Speculative decoding of one request, spelled out: slow, dense, no paging and no batching.

The yardstick for the worker, the trainer and the golden vectors: context K/V, block draft and acceptance stand alone,
and :func:`decode_greedy` puts them together.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.draft.config import Visibility
from sglang_dspark.draft.frozen_layers import linear_layer
from sglang_dspark.draft.heads import MarkovHead
from sglang_dspark.draft.model import DraftModel, base_logits

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
class ReferenceBlock:
    """One drafted block of g tokens and everything it was computed from; v tokens are proposed, V or fewer."""

    tokens: list[int]
    hidden: Tensor  # [g, d] after the final norm
    base_logits: Tensor  # [g, v] before the Markov bias
    logits: Tensor  # [g, v] after it; what each token was chosen from
    confidence_logits: Tensor | None  # [g] float32; None without a confidence head


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, seen: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention with an explicit mask.

    Args:
        q: ``[T, heads, hd]``.
        k, v: ``[S, kv_heads, hd]``.
        scale: of the scores.
        seen: ``[T, S]`` bool, which rows each query sees; None for all.
        sinks: ``[heads]`` one more score of each head, which ``scale`` does not touch and which has no value.

    Returns:
        ``[T, heads, hd]``.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1)[..., : len(k)], v)


def block_mask(visibility: Visibility, context_len: int, num_slots: int) -> Tensor:
    """``[num_slots, context_len + num_slots]`` bool: what each slot sees of the context, then of the block."""
    slots, ages = torch.arange(num_slots), context_len - torch.arange(context_len)
    return torch.cat((visibility.sees_context(ages, slots[:, None]), visibility.sees_block(slots)), dim=1)


def markov_step(
    head: MarkovHead, prev_tokens: Tensor, hidden: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``(bias [bs, v], w1_embedding [bs, r], new state)`` of one slot of the sequential walk.

    Args:
        prev_tokens: ``[bs]`` int64, the anchor for slot 0, else the token drafted in the slot before.
        hidden: ``[bs, d]`` post-norm backbone hidden of this slot.
        state: of :meth:`MarkovHead.initial_state` or the slot before.
    """
    w1_embedding = head.markov_w1(prev_tokens)
    latent, new_state = head.latent(w1_embedding, hidden, state)
    return head.markov_w2(latent), w1_embedding, new_state


def choose_greedy(logits: Tensor) -> int:
    """``[V]`` -> the first index of the largest logit."""
    return int(logits.argmax())


@torch.no_grad()
def draft_block(
    model: DraftModel, context: ContextKV, anchor: int, choose: Callable[[Tensor], int] = choose_greedy
) -> ReferenceBlock:
    """Draft gamma tokens after ``anchor``, which stands at position ``context.length``.

    The anchor's own target features are not in the context: the target has not seen it yet. ``choose`` draws the index
    of a proposed token from corrected logits ``[v]``.
    """
    config, device = model.config, context.k.device
    hidden = _block_hidden(model, context, anchor)
    logits_of_slots = base_logits(hidden, linear_layer(model.lm_head_weight), config)
    if config.selector_top_k is not None:
        least = logits_of_slots.topk(min(config.selector_top_k, config.num_proposed)).values[:, -1:]
        logits_of_slots = logits_of_slots.where(logits_of_slots >= least, float("-inf"))
    state = model.markov_head.initial_state(1, device, hidden.dtype) if model.markov_head is not None else None
    tokens: list[int] = []
    logits, confidences = [], []
    for draft in range(config.gamma):
        prev_token = torch.tensor([tokens[-1] if tokens else anchor], device=device)
        draft_logits, w1_embedding = logits_of_slots[draft], None
        if model.markov_head is not None:
            bias, w1_embedding, state = markov_step(model.markov_head, prev_token, hidden[draft : draft + 1], state)
            draft_logits = draft_logits + bias[0]
        if model.confidence_head is not None:
            confidences.append(model.confidence_head(hidden[draft : draft + 1], w1_embedding))
        logits.append(draft_logits)
        chosen = choose(draft_logits)
        tokens.append(chosen if model.token_ids is None else int(model.token_ids[chosen]))
    return ReferenceBlock(
        tokens, hidden, logits_of_slots, torch.stack(logits), torch.cat(confidences) if confidences else None
    )


def _block_hidden(model: DraftModel, context: ContextKV, anchor: int) -> Tensor:
    """``[g, d]`` of the slots that predict."""
    config, device = model.config, context.k.device
    ids = torch.tensor([anchor] + [config.mask_token_id] * (config.block_size - 1), device=device)
    positions = torch.arange(context.length, context.length + config.block_size, device=device)
    masks = [block_mask(v, context.length, config.block_size).to(device) for v in config.visibilities]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = torch.cat((context.k[layer], k)), torch.cat((context.v[layer], v))
        return attend_dense(q, keys, values, scale=config.attention_scale, seen=masks[layer], sinks=sinks)

    return model.forward_block(model.embed(ids), positions, attend)[config.first_slot :]


@dataclass(frozen=True)
class Round:
    """One draft-and-verify round."""

    start: int  # absolute position of the anchor
    anchor: int
    block: ReferenceBlock
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
    """Return the longest prefix of ``draft`` that the target would have chosen itself.

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
