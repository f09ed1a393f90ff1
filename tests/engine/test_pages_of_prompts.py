"""Prompts by ``trtllm_mha`` in pages, verification by slots: each reads what the other has written to SGLang's pool.

SGLang's kernels, which are those of Blackwell, are given literally.
"""

from types import SimpleNamespace

import pytest
import torch
from dense import dense_attention
from sglang.kernels.ops.kvcache import fused_fp8_qkv_kv_cache
from sglang.srt.layers.attention import trtllm_mha_backend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_objects import forward, partly

from sglang_dspark.engine.verify import CudaVerifyBackend, DSparkVerifyInput

HEADS, KV_HEADS, HEAD_DIM, PAGES = 4, 2, 16, 8
PROMPTS = (150, 1)  # the kernel of decoding attends for a last request of one token
ROWS, BEHIND = (5, 2), (70, 3)  # verified, and the next turn


def fill_table(req_to_token, req_pool_indices, cache_seqlens, page_table, page_size, **windows):
    """The page of every ``page_size`` tokens of a request; other entries are not read."""
    page_table.fill_(-1)
    for row, request in enumerate(req_pool_indices.tolist()):
        first = req_to_token[request, : int(cache_seqlens[row]) : page_size]
        page_table[row, : len(first)] = first // page_size


def attend_pages(query, kv_cache, block_tables, seq_lens, ends, bmm1_scale, bmm2_scale):
    """The last rows of each request over its [pages, heads, page, dim] keys and values."""
    found = []
    for row, length in enumerate(seq_lens.tolist()):
        rows = query[ends[row] : ends[row + 1]].float() * bmm1_scale * HEAD_DIM**0.5
        pages = block_tables[row, : -(-length // kv_cache[0].shape[2])].long()
        k, v = (part[pages].float().transpose(1, 2).flatten(0, 1)[:length] for part in kv_cache)
        visible = torch.arange(length) <= torch.arange(length - len(rows), length)[:, None]
        found.append(dense_attention(rows, k, v, visible) * bmm2_scale)
    return torch.cat(found).to(torch.bfloat16)


def context(*, query, kv_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, bmm2_scale, out, **rest):
    found = attend_pages(query, kv_cache, block_tables, seq_lens, cum_seq_lens_q.tolist(), bmm1_scale, bmm2_scale)
    return found if out is None else out.copy_(found)


def decode(*, query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, out, **rest):
    return context(
        query=query, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens, out=out,
        cum_seq_lens_q=torch.arange(len(seq_lens) + 1), bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale,
    )  # fmt: skip


def store_eight_bits(q, k, v, k_cache, v_cache, cache_loc, k_scale, v_scale):
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        cache[cache_loc] = (rows.view(-1, KV_HEADS, HEAD_DIM) / scale).to(cache.dtype)
    return q.to(k_cache.dtype)


@pytest.fixture
def kernels(monkeypatch):
    flashinfer = SimpleNamespace(
        prefill=SimpleNamespace(trtllm_batch_context_with_kv_cache=context),
        decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode),
    )
    monkeypatch.setattr(trtllm_mha_backend, "flashinfer", flashinfer, raising=False)
    monkeypatch.setattr(trtllm_mha_backend, "build_trtllm_mha_page_table", fill_table)
    monkeypatch.setattr(fused_fp8_qkv_kv_cache, "fused_fp8_qkv_kv_cache", store_eight_bits)


class Target:
    """One layer's attention as a server on Blackwell has it: SGLang's for prompts, ours for verification."""

    def __init__(self, page, dtype):
        torch.manual_seed(4)
        self.pool = MHATokenToKVPool(
            PAGES * page, page, dtype, KV_HEADS, HEAD_DIM, 1, "cpu", enable_memory_saver=False, enable_alt_stream=False
        )
        order = 1 + torch.randperm(PAGES).view(2, -1)
        self.table = (order[..., None] * page + torch.arange(page)).flatten(1).int()
        self.layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
        if dtype == torch.float8_e4m3fn:
            self.layer.k_scale_float, self.layer.v_scale_float = 0.5, 0.25
            self.layer.k_scale, self.layer.v_scale = torch.tensor(0.5), torch.tensor(0.25)
        self.prompts = partly(
            TRTLLMHAAttnBackend,
            req_to_token=self.table,
            token_to_kv_pool=self.pool,
            page_size=page,
            device="cpu",
            max_num_pages=PAGES,
            max_context_len=PAGES * page,
            data_type=dtype,
            q_data_type=torch.bfloat16,
            **dict.fromkeys(("is_xqa_impl", "use_fmha_v2", "use_sliding_window_kv_pool", "is_nvfp4_kvcache"), False),
            **dict.fromkeys(("uses_trtllm_gen_native_fp4", "expand_encoder_only_verify"), False),
            **dict.fromkeys(("_swa_kv_pool", "workspace_buffer", "_multi_ctas_kv_counter_buffer")),
            kv_cache_quant_method=UnquantizedKVCacheMethod(),
            kv_index_translator=SimpleNamespace(read_table=lambda *plan, **rows: SimpleNamespace(is_translated=False)),
            decode_seq_len_splits=1,
        )
        self.verification = partly(CudaVerifyBackend, req_to_token=self.table, token_to_kv_pool=self.pool)
        self.keys, self.values = ([torch.empty(0, KV_HEADS, HEAD_DIM)] * 2 for _ in range(2))

    def rows(self, lengths, before):
        """Queries, keys and values of new tokens, and their slots."""
        q, k, v = (torch.randn(sum(lengths), heads, HEAD_DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
        for held, new in ((self.keys, k), (self.values, v)):
            held[:] = [torch.cat(pair) for pair in zip(held, new.float().split(lengths), strict=True)]
        held = zip(self.table, before, lengths, strict=True)
        slots = [row[start : start + length] for row, start, length in held]
        return (q.flatten(1), k, v), torch.cat(slots).long()

    def expected(self, q, lengths):
        """Attention over all that was handed in so far."""
        found = []
        for rows, k, v in zip(q.view(-1, HEADS, HEAD_DIM).split(lengths), self.keys, self.values, strict=True):
            visible = torch.arange(len(k)) <= torch.arange(len(k) - len(rows), len(k))[:, None]
            found.append(dense_attention(rows, k, v, visible))
        return torch.cat(found).flatten(1)

    def encode(self, lengths, before):
        rows, slots = self.rows(lengths, before)
        whole = [start + length for start, length in zip(before, lengths, strict=True)]
        batch = forward(
            ForwardMode.EXTEND,
            batch_size=2,
            seq_lens=torch.tensor(whole),
            extend_seq_lens=torch.tensor(lengths),
            extend_seq_lens_cpu=list(lengths),
            extend_prefix_lens_cpu=list(before),
            req_pool_indices=torch.arange(2),
            out_cache_loc=slots,
            out_cache_loc_is_physical=False,
            kv_loc_plan=None,
            spec_info=None,
            _attn_output=None,
        )
        self.prompts.init_forward_metadata(batch)
        return self.prompts.forward_extend(*(part.clone() for part in rows), self.layer, batch), rows[0]

    def verify(self, lengths, before):
        rows, slots = self.rows(lengths, before)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        batch = forward(
            spec_info=partly(DSparkVerifyInput, indptr=ends, draft_token_num=max(lengths)),
            req_pool_indices=torch.arange(2),
            seq_lens=torch.tensor(before),
            out_cache_loc=slots,
        )
        return self.verification.forward_extend(*(part.clone() for part in rows), self.layer, batch), rows[0]


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 0.15)], ids=str)
def test_prompts_and_verifications_share_pages(kernels, page, dtype, tolerance):
    target, before = Target(page, dtype), (0, 0)
    for forward_pass, lengths in ((target.encode, PROMPTS), (target.verify, ROWS), (target.encode, BEHIND)):
        attended, q = forward_pass(lengths, before)
        expected = target.expected(q, lengths)
        torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)
        before = tuple(start + length for start, length in zip(before, lengths, strict=True))
