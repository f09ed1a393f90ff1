"""Acceptance by chance: what verification would keep of a drafter that this one stands in for.

A model with random weights has the step times of its shape, and its drafts are never accepted. Here draft i is kept
with a given probability if all before it are, so that steps commit as many tokens as those of a trained pair would.
The outcome has nothing to do with the target's law: it is for measuring times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.judging.outcome import Accepted
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from dspark_kernels.sampling.noise_device import uniforms

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))


def simulated_accept_ref(
    accepted: Accepted,
    draft_tokens: torch.Tensor,  # [bs, gamma] int64
    verify_lens: torch.Tensor,  # [bs] int
    probabilities: torch.Tensor,  # [>= gamma] float64
    keys: RoundKeys,
) -> Accepted:
    """The same as :func:`simulated_accept` in plain torch. No host sync."""
    gamma = draft_tokens.shape[1]
    slots = torch.arange(gamma + 1, device=draft_tokens.device)
    kept = keys.block_uniform(gamma, Purpose.ACCEPT) < probabilities[:gamma]
    kept &= slots[:-1] < verify_lens[:, None]
    lens = kept.long().cumprod(-1).sum(-1)
    bonus = accepted.bonus_tokens
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1))
    out_tokens = torch.where(slots < lens[:, None], drafts, -1)
    out_tokens = torch.where(slots == lens[:, None], bonus[:, None], out_tokens)
    return Accepted(lens, bonus, out_tokens, accepted.new_seq_lens - accepted.accepted_lens + lens)


@triton.jit(do_not_specialize=["seed", "drafts_stride"])
def _simulated_accept_kernel(
    draft_tokens_ptr,
    verify_lens_ptr,
    bonus_ptr,
    probabilities_ptr,
    request_keys_ptr,
    step_ptr,
    judged_lens_ptr,
    judged_seq_lens_ptr,
    lens_ptr,
    out_tokens_ptr,
    new_seq_lens_ptr,
    seed: tl.int64,
    drafts_stride,
    GAMMA: tl.constexpr,
    BLOCK_S: tl.constexpr,  # > GAMMA
):
    request = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_S)
    judged = (slots < tl.load(verify_lens_ptr + request)) & (slots < GAMMA)
    drawn = uniforms(seed, tl.load(step_ptr), tl.load(request_keys_ptr + request), slots, _ACCEPT)
    kept = judged & (drawn < tl.load(probabilities_ptr + slots, mask=judged, other=0.0))
    length = tl.min(tl.where(kept, BLOCK_S, slots), 0)
    tl.store(lens_ptr + request, length)
    drafts = tl.load(draft_tokens_ptr + request * drafts_stride + slots, mask=judged, other=-1)
    bonus = tl.load(bonus_ptr + request)
    emitted = tl.where(slots < length, drafts, tl.where(slots == length, bonus, -1))
    tl.store(out_tokens_ptr + request * (GAMMA + 1) + slots, emitted, mask=slots <= GAMMA)
    before = tl.load(judged_seq_lens_ptr + request) - tl.load(judged_lens_ptr + request)
    tl.store(new_seq_lens_ptr + request, before + length)


@on_kernels(simulated_accept_ref)
def simulated_accept(
    accepted: Accepted,
    draft_tokens: torch.Tensor,  # [bs, gamma] int64
    verify_lens: torch.Tensor,  # [bs] int
    probabilities: torch.Tensor,  # [>= gamma] float64
    keys: RoundKeys,
) -> Accepted:
    """Keep drafts by chance, in place of what was judged. One launch; safe under graph capture, no host sync.

    Args:
        accepted: what verification says; its bonus tokens stay, wherever they then stand.
        draft_tokens: the proposals; gamma = 0 is a plain step.
        verify_lens: drafts under verification, 0..gamma.
        probabilities: of keeping the draft of a slot when all before it are kept.
        keys: noise keys of this round. An int ``step`` costs a launch and is frozen in a graph.

    Returns:
        The outcome: kept while u < probability, with the uniforms by which verification would have judged.
    """
    bs, gamma = draft_tokens.shape
    lens = torch.empty_like(accepted.accepted_lens)
    out_tokens = draft_tokens.new_empty(bs, gamma + 1)
    new_seq_lens = torch.empty_like(accepted.new_seq_lens)
    _simulated_accept_kernel[(bs,)](
        draft_tokens,
        verify_lens,
        accepted.bonus_tokens,
        probabilities,
        keys.request_keys,
        keys.device_step,
        accepted.accepted_lens,
        accepted.new_seq_lens,
        lens,
        out_tokens,
        new_seq_lens,
        keys.signed_seed,
        draft_tokens.stride(0),
        GAMMA=gamma,
        BLOCK_S=triton.next_power_of_2(gamma + 1),
        num_warps=1,
    )
    return Accepted(lens, accepted.bonus_tokens, out_tokens, new_seq_lens)
