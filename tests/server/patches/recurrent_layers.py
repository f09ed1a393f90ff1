"""Layers with a gated delta net on a CPU, where SGLang's kernels need AMX: literal, token by token, in float32.

States are [slots, value heads, value size, key size], windows of the convolution [slots, channels, width - 1].
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch.nn.functional import silu, softplus

EPS = 1e-6  # of the norm of keys and queries
CHUNK = 64  # tokens, as SGLang counts them


def causal_conv1d_fn_cpu(
    x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **_
):
    """Return [channels, tokens] of several texts in a row, and keep the last inputs of each."""
    out = torch.empty_like(x)
    for i, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        window = conv_states[int(cache_indices[i])]
        before = window if has_initial_state[i] else torch.zeros_like(window)
        seen = torch.cat([before.to(x.dtype), x[:, begin:end]], dim=1)
        for j in range(end - begin):
            summed = (seen[:, j : j + weight.shape[1]] * weight).sum(1)
            out[:, begin + j] = silu(summed if bias is None else summed + bias)
        window.copy_(seen[:, seen.shape[1] - window.shape[1] :])
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, *, conv_state_indices):
    """Return [texts, channels] of one token of each text."""
    rows = torch.arange(len(x) + 1)
    return causal_conv1d_fn_cpu(
        x.T,
        weight,
        bias,
        activation=activation,
        conv_states=conv_states,
        has_initial_state=rows >= 0,
        cache_indices=conv_state_indices,
        query_start_loc=rows,
    ).T


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):  # noqa: N803 - a name of SGLang's
    """Return the logarithms of the decays and the strengths of the updates, [1, tokens, value heads] each."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, *, initial_state, cu_seqlens, initial_state_indices, **_):
    """Return [1, tokens, value heads, value size] of several texts in a row, and states; keep the last state of each.

    Of every text, the third result has the state before each chunk: [1, chunks, value heads, value size, key size].
    """
    out, before_chunks = torch.empty_like(v), []
    queries, keys = (spread(part[0].float(), v.shape[2]) for part in (q, k))
    queries = queries * queries.shape[-1] ** -0.5
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        stored = initial_state[int(initial_state_indices[i])]
        state = stored.float()
        for t in range(begin, end):
            if (t - begin) % CHUNK == 0:
                before_chunks.append(state)
            state = state * g[0, t].exp()[:, None, None]
            known = torch.einsum("hvk,hk->hv", state, keys[t])
            update = (v[0, t].float() - known) * beta[0, t][:, None]
            state = state + torch.einsum("hv,hk->hvk", update, keys[t])
            out[0, t] = torch.einsum("hvk,hk->hv", state, queries[t])
        stored.copy_(state)
    return out, None, torch.stack(before_chunks)[None]


def spread(vectors, heads):
    """Return [tokens, heads, size] of unit length for fewer heads, each of which serves as many others."""
    unit = vectors * (vectors.square().sum(-1, keepdim=True) + EPS).rsqrt()
    return unit.repeat_interleave(heads // vectors.shape[1], dim=1)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log,  # noqa: N803 - as above
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    **_,
):
    """Return what ``chunk_gated_delta_rule_cpu`` does, of gates that are not computed yet."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, cu_seqlens=cu_seqlens, **states)[0]


def fused_sigmoid_mul_cpu(x, gate):
    """Multiply x by the gate."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    """Return [tokens * heads, head size] of both, normalised."""
    return tuple(gemma_norm(part.reshape(-1, head_dim), w, eps) for part, w in ((q, q_weight), (k, k_weight)))


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Return the same, of queries whose heads have a gate each behind them, and the gates."""
    q, gate = q_gate.view(len(q_gate), num_heads, 2 * head_dim).chunk(2, dim=-1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(-1, head_dim).contiguous()


def gemma_norm(x, weight, eps):
    """Return x, normalised by a weight that is stored less one."""
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key_size, value_size):
    """Return queries, keys and values of a row, its output gates, and b and a."""
    values = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(len(z), value_heads, value_size), b.contiguous(), a.contiguous()


def layernorm_fn(x, weight, bias, z=None, eps=1e-6, activation="swish", **_):
    """Return x, normalised and then gated."""
    x32 = x.float()
    gate = z.float().sigmoid() if activation == "sigmoid" else silu(z.float())
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float() * gate).to(x.dtype)


OF_A_MODULE = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
OF_TORCH = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
)


def install(_module=None):
    """Put them where SGLang's models and backends look for them, on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    kernels = sys.modules["sgl_kernel.mamba"] = ModuleType("sgl_kernel.mamba")
    for function in OF_A_MODULE:
        setattr(kernels, function.__name__, function)
    for function in OF_TORCH:
        setattr(torch.ops.sgl_kernel, function.__name__, function)


def install_norm(module):
    """Put the gated norm into SGLang's module of it."""
    if not torch.cuda.is_available():
        module.layernorm_fn = layernorm_fn
