"""Stand in for what SGLang's own worker lacks on a CPU."""

import os

import torch
from torch.nn.functional import scaled_dot_product_attention


class OnGpu:
    """The arguments of a server, except the device."""

    device = "cuda"

    def __init__(self, args):
        self._args = args

    def __getattr__(self, name):
        return getattr(self._args, name)


def draft_with_torch(module):
    """Let drafters attend with torch."""
    module.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")


def accept_a_cpu(module):
    """Have the check of the arguments believe in a GPU, on servers with ``SGLANGS_OWN_ON_A_CPU``."""
    view = module.resolving_view

    def handle(args, original=module._handle_dspark):
        if "SGLANGS_OWN_ON_A_CPU" in os.environ:
            module.resolving_view = lambda args: OnGpu(view(args))
        try:
            original(args)
        finally:
            module.resolving_view = view

    module._handle_dspark = handle


def verify_with_torch(module):
    """Give the attention backend of a CPU verification: rows after texts that lie in the cache."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, original=TorchNativeAttnBackend.forward_extend):
        if not batch.forward_mode.is_target_verify():
            return original(self, q, k, v, layer, batch, save_kv_cache)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        pool = self.token_to_kv_pool
        stored = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        # Rows after the last are padding, and nothing reads what becomes of them.
        queries, attended = q.view(-1, layer.tp_q_head_num, layer.head_dim), torch.zeros_like(q)
        out = attended.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        begin = 0
        for row, context, new in zip(
            batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), rows_of_requests(batch), strict=True
        ):
            slots = self.req_to_token_pool.req_to_token[row, : context + new].long()
            keys, values = (part[slots].movedim(0, 1)[None] for part in stored)
            visible = torch.ones(new, context + new, dtype=torch.bool)
            if layer.attn_type != AttentionType.ENCODER_ONLY:  # the drafter's blocks see themselves whole
                visible = visible.tril(context)
            out[begin : begin + new] = scaled_dot_product_attention(
                queries[begin : begin + new].movedim(0, 1)[None],
                keys,
                values,
                attn_mask=visible,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].movedim(1, 0)
            begin += new
        return attended

    TorchNativeAttnBackend.forward_extend = forward_extend


def rows_of_requests(batch):
    """Return how many rows a verification has for each request."""
    layout = getattr(batch.spec_info, "ragged_verify_layout", None)
    if layout is None:
        return [batch.spec_info.draft_token_num] * batch.batch_size
    return layout.verify_lens.tolist()


def verify_by_request(module):
    """Let requests verify different numbers of drafts where a test says so."""

    def why_whole_blocks(args, original=module.why_whole_blocks):
        return None if os.environ.get("SGLANG_RAGGED_VERIFY_MODE") == "compact" else original(args)

    module.why_whole_blocks = why_whole_blocks


def copy_no_kv(module):
    """Leave out a Triton kernel that copies K/V, which only trees of drafts need."""
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


def serve_by_another_name(module):
    """Serve a target that our own worker does not know."""
    registry = module.ModelRegistry
    registry.models["OfSglangAloneForCausalLM"] = registry.models["Qwen3ForCausalLM"]


def ignore_streams(module):
    """Let a step keep tensors alive for a stream, which a CPU has none of."""
    torch.Tensor.record_stream = lambda self, stream: None


def find_slots(module):
    """Give the K/V slots of a verification's rows."""

    def slots_behind(rows, req_to_token, begins, ends, out, num_columns):
        parts = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        slots = torch.cat([req_to_token[row, begin:end] for row, begin, end in parts])
        out[: len(slots)] = slots

    module.assign_extend_cache_locs_cpu = slots_behind


def sample_with_torch(module):
    """Give rejection sampling of chains."""

    def sample(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
        *,
        block_verification=False,
    ):
        assert not block_verification, "chains are judged token by token"
        for request, drafts in enumerate(candidates.tolist()):
            target, draft, accepted = target_probs[request], draft_probs[request], 0
            while accepted < len(drafts) - 1:
                token = drafts[accepted + 1]
                if uniform_samples[request, accepted] * draft[accepted, token] >= target[accepted, token]:
                    break
                accepted += 1
            left = target[accepted].clone()
            if accepted < len(drafts) - 1:
                left = (left - draft[accepted]).clamp(min=0)
            drawn = uniform_samples_for_final_sampling[request] * left.sum()
            last = torch.searchsorted(left.cumsum(0), drawn, right=True).clamp(max=len(left) - 1)
            places = retrive_index[request]
            accept_index[request] = places
            predicts[places[:accepted]] = candidates[request, 1 : accepted + 1].to(predicts.dtype)
            predicts[places[accepted]] = last.to(predicts.dtype)
            accept_token_num[request] = accepted

    module.chain_speculative_sampling_triton = sample
