"""Tests of the K/V slots of decode steps: there are enough of them, none is given twice, and none is lost.

Prompts by ``trtllm_mha`` in pages and verification by slots read what the other has written; SGLang's kernels of
Blackwell are given literally.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from acceptance_cases import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.kvcache import fused_fp8_qkv_kv_cache
from sglang.srt.layers.attention import trtllm_mha_backend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang_objects import batch, forward, partly, request, table

from sglang_dspark.engine import draft_input
from sglang_dspark.engine.draft_input import STRIDE, DSparkDraftInput
from sglang_dspark.engine.verify import CudaVerifyBackend, DSparkVerifyInput

WIDTH = 8
COLUMNS = 1024


class Server:
    """Running requests on SGLang's pools, without a prefix cache."""

    def __init__(self, requests, slots, page=1):
        make = TokenToKVPoolAllocator if page == 1 else partial(PagedTokenToKVPoolAllocator, page_size=page)
        self.pool = make(slots, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)
        rows = table(requests, COLUMNS)
        cache = RadixCache(CacheInitParams(True, rows, self.pool, page_size=1))
        reqs = [request() for _ in range(requests)]
        for row, req in enumerate(reqs):
            req.kv.req_pool_idx, req.kv.kv_committed_len, req.kv.kv_allocated_len = row, 0, 0
        self.batch = batch(
            *reqs,
            tree_cache=cache,
            token_to_kv_pool_allocator=self.pool,
            req_to_token_pool=rows,
            req_pool_indices=torch.arange(requests),
            device="cpu",
            maybe_evict_swa=lambda: None,
        )
        self.slots, self.page, self.reservations = slots, page, 0
        self.flying, self.lengths = [], dict.fromkeys(reqs, 0)

    def prefill(self, lengths):
        """Give every request slots for a prompt, as SGLang does: a page that is not full holds its last tokens."""
        for req, length in zip(self.batch.reqs, lengths, strict=True):
            slots = self.pool.alloc(-(-length // self.page) * self.page)[:length]
            self.batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length] = slots.int()
            req.kv.kv_committed_len = req.kv.kv_allocated_len = self.lengths[req] = length

    def fits(self):
        """Whether SGLang finds room for a step."""

        def check(batch, selected):
            required = draft_input.slots_required(batch, batch.reqs, self.page)
            return self.pool.check_decode_capacity(num_tokens=required, tree_cache=batch.tree_cache)

        return draft_input.fits(check, self.batch)

    def aligned(self, length):
        return -(-length // self.page) * self.page

    def step(self, commits, *, overlaps=False):
        """Reserve for a step, launch it with as many drafts as there is room for, and commit so many tokens at most.

        Under overlap the outcome of the step before becomes known then, and not that of this one.
        """
        before = self.pool.available_size()
        state = DSparkDraftInput(torch.empty(0), torch.empty(0))
        state.prepare_for_decode(self.batch)
        reqs = self.batch.reqs
        self.reservations += before != self.pool.available_size()
        assert self.batch.seq_lens_cpu.tolist() == [req.kv.kv_committed_len for req in reqs]
        assert self.batch.seq_lens_sum == sum(req.kv.kv_committed_len for req in reqs)
        assert state.nxt_kv_lens_cpu.tolist() == [req.kv.kv_allocated_len for req in reqs]
        room = [WIDTH - 1 if state.room is None else state.room] * len(reqs)
        for req, drafts in zip(reqs, room, strict=True):
            assert self.lengths[req] + drafts + 1 <= req.kv.kv_allocated_len
        commits = [min(commit, drafts + 1) for commit, drafts in zip(commits, room, strict=True)]
        self.flying.append((list(reqs), commits))
        for req, committed in zip(reqs, commits, strict=True):
            self.lengths[req] += committed
        while len(self.flying) > overlaps:
            self.land()
        return room

    def land(self):
        """The host learns what became of a step."""
        reqs, commits = self.flying.pop(0)
        draft_input.forget_step(reqs)
        for req, committed in zip(reqs, commits, strict=True):
            req.kv.kv_committed_len += committed

    def held(self):
        """Slots of all requests."""
        table, records = self.batch.req_to_token_pool.req_to_token, [req.kv for req in self.batch.reqs]
        return [slot for kv in records for slot in table[kv.req_pool_idx, : kv.kv_allocated_len].tolist()]

    def end(self, place):
        """A request gives back what it was given, whole pages, as SGLang does."""
        req = self.batch.reqs.pop(place)
        self.batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in self.batch.reqs])
        self.pool.free(self.batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].long())


@pytest.fixture
def width():
    with get_context().override_server_args(speculative_num_draft_tokens=WIDTH, attention_backend="torch_native"):
        yield


@pytest.mark.usefixtures("width")
@settings(max_examples=80)
@given(st.data())
def test_every_slot_has_one_owner_and_none_is_lost(data):
    """Whatever steps accept and whichever requests end, in pools with room for strides, in tight ones and in pages.

    Prompts end anywhere in a page; positions of a page lie one after the other in its slots.
    """
    page, requests = data.draw(st.sampled_from([1, 8, 16, 64, 128])), data.draw(st.integers(1, 5))
    server = Server(requests, 4096 if page > 1 else data.draw(st.sampled_from([5 * (16 + 100), 4000])), page)
    server.prefill([data.draw(st.integers(1, 3 * page)) for _ in server.batch.reqs])
    overlaps = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 12))):
        server.step([data.draw(st.integers(1, WIDTH)) for _ in server.batch.reqs], overlaps=overlaps)
        held = server.held()
        assert len(set(held)) == len(held) and min(held) >= page  # the first page is padding
        assert server.pool.available_size() + len(held) == server.slots
        for req in server.batch.reqs if page > 1 else ():
            assert req.kv.kv_allocated_len % page == 0
            slots = server.batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
            pages = slots.view(-1, page)
            assert torch.equal(pages, pages[:, :1] + torch.arange(page)) and not (pages[:, 0] % page).any()
        if data.draw(st.booleans()) and len(server.batch.reqs) > 1:
            server.end(data.draw(st.integers(0, len(server.batch.reqs) - 1)))
    while server.batch.reqs:
        server.end(0)
    assert server.pool.available_size() == server.slots


@pytest.mark.usefixtures("width")
def test_most_steps_reserve_nothing():
    server = Server(4, 10_000)
    for _ in range(40):
        assert server.step([3] * 4) == [WIDTH - 1] * 4
    assert server.reservations <= 1 + 40 * 3 // STRIDE


@pytest.mark.usefixtures("width")
def test_a_tight_pool_gives_what_the_step_needs_and_no_more():
    """Strides of others would have a request retracted, for which there is room. A slot waits for the next anchor."""
    server = Server(4, 4 * (2 * WIDTH + 40))
    server.prefill([1] * 4)
    for _ in range(20):
        server.step([2] * 4)
    assert all(req.kv.kv_allocated_len == req.kv.kv_committed_len - 2 + WIDTH + 1 for req in server.batch.reqs)


@pytest.mark.usefixtures("width")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_step_fits_as_long_as_one_without_drafts_does(data):
    """Whatever requests keep for drafts: the last steps in a pool verify fewer, or none."""
    page, requests = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.integers(1, 4))
    slots = page * data.draw(st.integers(3, 80 // page)) * requests
    server, overlaps = Server(requests, slots, page), data.draw(st.booleans())
    server.prefill([data.draw(st.integers(1, page)) for _ in server.batch.reqs])
    while server.batch.reqs:
        room = slots - sum(server.aligned(server.lengths[req] + 1) for req in server.batch.reqs)
        assert server.fits() == (room >= 0)
        if room < 0:
            while server.flying:
                server.land()
            server.end(data.draw(st.integers(0, len(server.batch.reqs) - 1)))
            continue
        server.step([data.draw(st.integers(1, WIDTH)) for _ in server.batch.reqs], overlaps=overlaps)
        held = server.held()
        assert len(set(held)) == len(held)
    assert server.pool.available_size() == slots


@pytest.mark.usefixtures("width")
def test_drafts_fill_what_is_left_of_a_pool():
    server = Server(1, 20)
    server.prefill([8])
    assert [server.step([1])[0] for _ in range(12) if server.fits()] == [7, 7, 7, 7, 6, 5, 4, 3, 2, 1, 0, 0]


class TwoPools:
    """The part of SGLang's allocator of two pools, and of its cache, that is asked what is left."""

    def __init__(self, full, of_windows):
        self.full, self.of_windows = full, of_windows
        self.full_available_size = self.full_evictable_size = lambda: full
        self.swa_available_size = self.swa_evictable_size = lambda: of_windows

    def supports_swa(self):
        return True


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize(("full", "of_windows"), [(5, 9), (9, 5)])
def test_the_pool_that_has_less_decides(full, of_windows):
    """A stride takes slots of both, and what the cache gives up of one does not help the other."""
    pools = TwoPools(full, of_windows)
    assert draft_input.spare_slots(pools, pools) == 10


HEADS, KV_HEADS, HEAD_DIM, PAGES = 4, 2, 16, 8
PROMPTS = (150, 1)  # the kernel of decoding attends for a last request of one token
ROWS, BEHIND = (5, 2), (70, 3)  # verified, and the next turn


def fill_table(req_to_token, req_pool_indices, cache_seqlens, page_table, page_size, **windows):
    """The page of every ``page_size`` tokens of a request; other entries are not read."""
    page_table.fill_(-1)
    for row, slot in enumerate(req_pool_indices.tolist()):
        first = req_to_token[slot, : int(cache_seqlens[row]) : page_size]
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
