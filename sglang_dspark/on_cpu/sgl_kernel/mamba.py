"""Layers with a gated delta net, several requests at a time: the convolution and the recurrence, with their states.

``dspark_kernels.recurrence`` has the formulas. States are [slots, value heads, value size, key size], windows of the
convolution [slots, channels, width - 1], and both are written in place. What SGLang's decode rounds is rounded here.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu, softplus

_EPS = 1e-6  # of the length of queries and keys
_CHUNK = 64  # tokens, as SGLang counts them


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return [channels, tokens] of prompts, one after the other, and keep the last inputs of each."""
    out = torch.empty_like(x)
    slots, begun = cache_indices.tolist(), has_initial_state.tolist()
    for (begin, end), slot, continues in zip(pairwise(query_start_loc.tolist()), slots, begun, strict=True):
        window = conv_states[slot]
        before = window if continues else torch.zeros_like(window)
        seen = torch.cat([before.to(x.dtype), x[:, begin:end]], dim=1).T
        taps = [seen[tap : tap + end - begin] for tap in range(weight.shape[1])]
        out[:, begin:end] = _convolved(taps, weight, bias).to(x.dtype).T
        window.copy_(seen[len(seen) - window.shape[1] :].T)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Return [requests, channels] of one token of each request."""
    windows = conv_states[conv_state_indices]
    out = _convolved([*windows.unbind(-1), x], weight, bias).to(x.dtype)
    conv_states[conv_state_indices] = torch.cat([windows[:, :, 1:], x.to(windows.dtype)[:, :, None]], dim=-1)
    return out


def _convolved(taps: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return float32 [tokens, channels] of as many inputs of each as the weight [channels, width] has taps."""
    total = torch.zeros_like(taps[-1], dtype=torch.float32) if bias is None else bias.float()
    for tap, inputs in enumerate(taps):
        total = total + (inputs * weight[:, tap]).float()
    return silu(total)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803 - a name of SGLang's
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithms of the decays and the strengths of the updates, float32 [1, tokens, value heads] each."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid().to(b.dtype).float()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,  # noqa: N803 - as above
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **states: Any,
) -> torch.Tensor:
    """Return [1, tokens, value heads, value size], and keep the state after each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states["initial_state"] = states.pop("initial_state_source")
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, **states)[0]


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Return [1, tokens, value heads, value size] of gates that are known, and keep the state after each request.

    The third result has the states [1, chunks, value heads, value size, key size] before each chunk of each request.
    """
    out, keys, values, decays = torch.empty_like(v), _spread(k[0], v), v[0].float(), g[0].exp()
    queries = _spread(q[0], v) * q.shape[-1] ** -0.5
    # The token of this number of all requests that have so many; the longest come first.
    lengths, order = cu_seqlens.diff().sort(descending=True, stable=True)
    begins, slots = cu_seqlens[:-1][order].long(), initial_state_indices[order].long()
    states, chunks = initial_state[slots].float(), []
    for number in range(int(lengths[0])):
        count = int((lengths > number).sum())
        if number % _CHUNK == 0:
            chunks += [(request, number, states[i].clone()) for i, request in enumerate(order[:count].tolist())]
        tokens, state = begins[:count] + number, states[:count]
        state *= decays[tokens, :, None, None]
        change = (values[tokens] - _times(state, keys[tokens])) * beta[0, tokens, :, None]
        state += change[..., None] * keys[tokens, :, None, :]
        out[0, tokens] = _times(state, queries[tokens]).to(out.dtype)
    initial_state[slots] = states.to(initial_state.dtype)
    before = [state for _, _, state in sorted(chunks, key=lambda chunk: chunk[:2])]
    return out, None, torch.stack(before)[None]


def _spread(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return float32 [tokens, value heads, size] of length 1, of fewer heads, each of which serves as many others."""
    x = x.float()
    x = x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()
    return x.repeat_interleave(v.shape[2] // x.shape[1], dim=1)


def _times(states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the products [n, heads, value size] of states and vectors [n, heads, key size]."""
    return (states @ x[..., None])[..., 0]
