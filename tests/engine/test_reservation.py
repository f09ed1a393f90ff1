"""K/V slots of decode steps: enough of them, none twice, none lost; few reservations where there is room."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang_objects import batch, request, table

from sglang_dspark.engine import draft_input
from sglang_dspark.engine.draft_input import STRIDE, DSparkDraftInput

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


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setattr(draft_input, "tokens_per_step", lambda: WIDTH)
    monkeypatch.setattr(allocation, "attention_backends", lambda: ("torch_native", "torch_native"))


@settings(max_examples=80)
@given(st.data())
def test_every_slot_has_one_owner_and_none_is_lost(data):
    """Whatever steps accept and whichever requests end, in pools with room for strides, in tight ones and in pages.

    Prompts end anywhere in a page; positions of a page lie one behind the other in its slots.
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


def test_most_steps_reserve_nothing():
    server = Server(4, 10_000)
    for _ in range(40):
        assert server.step([3] * 4) == [WIDTH - 1] * 4
    assert server.reservations <= 1 + 40 * 3 // STRIDE


def test_a_tight_pool_gives_what_the_step_needs_and_no_more():
    """Strides of others would have a request retracted, for which there is room. A slot waits for the next anchor."""
    server = Server(4, 4 * (2 * WIDTH + 40))
    server.prefill([1] * 4)
    for _ in range(20):
        server.step([2] * 4)
    assert all(req.kv.kv_allocated_len == req.kv.kv_committed_len - 2 + WIDTH + 1 for req in server.batch.reqs)


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


@pytest.mark.parametrize(("full", "of_windows"), [(5, 9), (9, 5)])
def test_the_pool_that_has_less_decides(full, of_windows):
    """A stride takes slots of both, and what the cache gives up of one does not help the other."""
    pools = TwoPools(full, of_windows)
    assert draft_input.spare_slots(pools, pools) == 10
