"""Attention on a CPU with what SGLang has there only with AMX: literal, in float64.

Sinks; windows whose K/V have a pool of their own; layers that read the K/V of an earlier one.
"""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

NAME = "intel_amx"  # SGLang checks that such targets have one of a few
WITHOUT_AMX = "torch_native"  # what SGLang takes in its place


class LiteralAttention(TorchNativeAttnBackend):
    """That of ``torch_native``, which hands sinks on and reads a pool of windows where it writes to it."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """[tokens, heads * hd] of prompts, whose beginnings may lie in the cache."""
        batch = forward_batch
        lens = zip(batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True)
        return self._attended(q, k, v, layer, batch, save_kv_cache, sinks, lens)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """[requests, heads * hd] of the last token of each text."""
        lens = ((length - 1, 1) for length in forward_batch.seq_lens.tolist())
        return self._attended(q, k, v, layer, forward_batch, save_kv_cache, sinks, lens)

    def _attended(self, q, k, v, layer, batch, save_kv_cache, sinks, lens):
        """[tokens, heads * hd] of requests; ``lens``: of each, tokens in the cache and new ones."""
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        stored = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        has_own_pool = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        queries, attended = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).double(), []
        for row, (cached, new) in zip(batch.req_pool_indices.tolist(), lens, strict=True):
            slots = self.req_to_token_pool.req_to_token[row, : cached + new].long()
            if has_own_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)
            own, queries = queries[:new], queries[new:]
            keys, values = (
                part[slots].double().repeat_interleave(own.shape[1] // part.shape[1], dim=1) for part in stored
            )
            ages = cached + torch.arange(new)[:, None] - torch.arange(cached + new)
            hidden = ages < 0
            if layer.sliding_window_size >= 0:
                hidden |= ages > layer.sliding_window_size
            scores = torch.einsum("thd,shd->hts", own, keys) * layer.scaling
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], dim=-1)
            weights = scores.softmax(dim=-1)[..., : cached + new]
            attended.append(torch.einsum("hts,shd->thd", weights, values))
        return torch.cat(attended).to(q.dtype).reshape(q.shape)


def install(module):
    """Put it into SGLang's module of the registry of attention backends, on a machine without a GPU."""
    if not torch.cuda.is_available():
        module.ATTENTION_BACKENDS[NAME] = module.ATTENTION_BACKENDS[WITHOUT_AMX] = LiteralAttention
