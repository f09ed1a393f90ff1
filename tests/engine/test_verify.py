"""Tests of verification by the target: its attention as a GPU server computes it, here in torch, and its padding.

The needs of a drafter are noted where this SGLang reads them.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from acceptance_cases import FP32_TOL, dense_attention
from dspark_kernels import PagedWindows, RoundKeys, SamplingBatch, VerifyRows, window_attention
from dspark_kernels.attention import prompts
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_objects import GOLDEN, forward, model_config, partly, runner, server_args, table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine import target
from sglang_dspark.engine import verify as module
from sglang_dspark.engine.graphs import copy_logits, static_verify
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.engine.verify import CudaVerifyBackend, DSparkVerifyInput, PhasedBackend, check_pool
from sglang_dspark.errors import ConfigError, EngineError
from sglang_dspark.step.state import DecodeBatch, VerifyPlan

ROWS, REQUESTS = 8, 3


def runner_of(forward, pool=None):
    """A runner of a model whose forward this is."""
    model = partly(Qwen3ForCausalLM, forward=forward)
    known = {"model_config": model_config(), "attn_backend": None, "spec_algorithm": None}
    return runner(model=model, token_to_kv_pool=pool, **known)


def buffers():
    """A tier of 8 rows and 3 request slots."""
    zeros = torch.zeros(REQUESTS, dtype=torch.int64)
    keys = RoundKeys(0, 0, zeros, zeros)
    step = DecodeBatch(
        zeros, zeros, zeros, zeros.view(1, -1), SamplingBatch.by_temperature(REQUESTS, None, "cpu"), keys
    )
    return step, VerifyPlan.of(VerifyRows.empty(REQUESTS, ROWS, torch.device("cpu")), width=4)


@pytest.mark.parametrize(("buffered", "cap"), [(True, None), (False, None), (False, 30.0)])
def test_without_a_buffer_logits_keep_their_dtype(buffered, cap):
    """Except those that are capped. Padding of the vocabulary is cut off, and other forwards get float32 as before."""
    logits = torch.randn(ROWS, 6).bfloat16()
    processor = partly(LogitsProcessor, vocab_size=5, final_logit_softcapping=cap)

    def copied(buffer):
        metadata = partly(LogitsMetadata, next_token_logits_buffer=buffer)
        return copy_logits(LogitsProcessor._copy_logits_to_buffer, processor, logits, metadata)

    def forward(input_ids, positions, batch):
        return LogitsProcessorOutput(next_token_logits=copied(batch.next_token_logits_buffer))

    buffer = torch.zeros(ROWS, 5) if buffered else None
    run = static_verify(runner_of(forward), *buffers(), buffer)
    found = run().logits_output.next_token_logits
    assert found.dtype == (torch.float32 if buffered or cap else torch.bfloat16)
    assert torch.equal(found.float(), logits[:, :5].float())
    assert not buffered or found is buffer
    assert copied(None).dtype == torch.float32


def test_every_replay_translates_its_slots():
    """For layers with a window, whose pool gives other rows to the same slots as time goes by."""
    seen = []

    def forward(input_ids, positions, batch):
        seen.append(batch.spec_info.slots_of_windows.tolist())
        return LogitsProcessorOutput(next_token_logits=None)

    pool, translation = partly(SWAKVPool), torch.arange(100) % 7
    pool.register_mapping(translation)
    step, plan = buffers()
    run = static_verify(runner_of(forward, pool), step, plan, torch.zeros(ROWS, 5))
    for slots in (torch.arange(ROWS), 50 - torch.arange(ROWS)):
        plan.slots.copy_(slots)
        run()
    translation.add_(1)
    run()
    assert seen == [[0, 1, 2, 3, 4, 5, 6, 0], [1, 0, 6, 5, 4, 3, 2, 1], [2, 1, 7, 6, 5, 4, 3, 2]]


def test_the_number_of_real_rows_is_known_on_the_device():
    """A replay reads it again: routing of experts, for one, leaves out the rows after it."""
    seen = []

    def forward(input_ids, positions, batch):
        assert len(input_ids) == ROWS
        # Where routing asks; the answer is the batch's, if no ranks share out the rows.
        assert get_forward_context().moe_num_token_non_padded.__self__ is batch
        seen.append((int(batch.num_token_non_padded), batch.num_token_non_padded.data_ptr()))
        return LogitsProcessorOutput(next_token_logits=None)

    step, plan = buffers()
    run = static_verify(runner_of(forward), step, plan, torch.zeros(ROWS, 5))
    for real in (0, 5, 8, 1):
        plan.indptr[-1] = real
        run()
    assert [number for number, _ in seen] == [0, 5, 8, 1]
    assert len({place for _, place in seen}) == 1


def test_features_prepare_every_replay_before_the_forward():
    seen = []

    def forward(input_ids, positions, batch):
        seen.append(batch.mrope_positions.tolist())
        return LogitsProcessorOutput(next_token_logits=None)

    class Doubled:
        def prepare(self, plan, forward_batch):
            forward_batch.mrope_positions = 2 * plan.positions[:2]

    step, plan = buffers()
    plan.positions.zero_()
    run = static_verify(runner_of(forward), step, plan, torch.zeros(ROWS, 5), [Doubled()])
    for first in (3, 4):
        plan.positions[0] = first
        run()
    assert seen == [[6, 0], [8, 0]]


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Pool:
    """The part of SGLang's K/V pool that is used; like that one it divides in place if it has to round."""

    def __init__(self, slots, dtype):
        self.dtype = dtype
        self.k, self.v = (torch.randn(slots, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))

    def set_kv_buffer(self, layer, where, k, v, k_scale=None, v_scale=None):
        for pool, rows, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if rows.dtype != self.dtype:
                rows.div_(scale or 1.0)
            pool.view(torch.uint8).view(len(pool), -1)[where.loc] = rows.to(self.dtype).view(torch.uint8).flatten(1)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def a_layer(scales=(None, None), keys_before=-1):
    layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    layer.sliding_window_size = keys_before  # SGLang itself would take 0 for no window
    layer.k_scale_float, layer.v_scale_float = scales
    return layer


def backend_of(pool, slots_of_rows, *, deterministic=False):
    """The backend of a GPU, over this pool."""
    requests = table(*slots_of_rows.shape)
    requests.req_to_token = slots_of_rows
    args = SimpleNamespace(enable_deterministic_inference=deterministic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        pools = {"token_to_kv_pool": pool, "req_to_token_pool": requests, "kv_cache_dtype": pool.dtype}
        return CudaVerifyBackend(runner(**pools, server_args=args))


def verify(dtype=torch.float32, scales=(None, None), keys_before=-1, sinks=None):
    """Attention of two requests with 3 and 2 rows, with the pool, the layout, and what the forward was given."""
    torch.manual_seed(1)
    backend = backend_of(Pool(32, dtype), torch.randperm(30).view(3, 10).int() + 1)
    rows, lens, indptr = torch.tensor([2, 0]), torch.tensor([5, 1]), torch.tensor([0, 3, 5])
    q = torch.randn(5, HEADS * HEAD_DIM)
    k, v = (torch.randn(5, KV_HEADS * HEAD_DIM) for _ in range(2))
    layer = a_layer(scales, keys_before)
    slots = torch.cat([backend.req_to_token[2, 5:8], backend.req_to_token[0, 1:3]]).long()
    layout = partly(DSparkVerifyInput, indptr=indptr, draft_token_num=3)
    batch = forward(spec_info=layout, req_pool_indices=rows, seq_lens=lens, out_cache_loc=slots)
    given = q.clone(), k.clone(), v.clone()
    attended = backend.forward_extend(q, k, v, layer, batch, sinks=sinks)
    return attended, given, backend, PagedWindows(backend.req_to_token, rows, lens, indptr, 3), slots


def heads_of(x):
    return x.view(5, -1, HEAD_DIM)


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -1.0, 0.0, 2.0]).bfloat16()], ids=["plain", "sinks"])
@pytest.mark.parametrize("keys_before", [-1, 0, 3, 6])
def test_which_keys_a_row_sees(keys_before, sinks):
    """No row sees a later one, a layer without a window (-1) all before, and heads have sinks, each its own."""
    attended, rows, backend, windows, slots = verify(keys_before=keys_before, sinks=sinks)
    pool = backend.token_to_kv_pool.k, backend.token_to_kv_pool.v
    q, *kv = map(heads_of, rows)
    for request, (start, end) in enumerate([(0, 3), (3, 5)]):
        prefix = int(windows.prefix_lens[request])
        before = backend.req_to_token[windows.req_pool_indices[request], :prefix].long()
        keys, values = (torch.cat([cached[before], x[start:end]]) for cached, x in zip(pool, kv, strict=True))
        ages = prefix + torch.arange(end - start)[:, None] - torch.arange(prefix + end - start)
        seen = (ages >= 0) & ((ages <= keys_before) | (keys_before < 0))
        expected = dense_attention(q[start:end], keys, values, seen, sinks)
        torch.testing.assert_close(heads_of(attended)[start:end].double(), expected, **FP32_TOL)
    assert all(torch.equal(stored[slots], x) for stored, x in zip(pool, kv, strict=True))


@pytest.mark.parametrize("translated", [True, False], ids=["a step", "a dummy forward"])
def test_a_layer_in_a_pool_of_windows(translated):
    """Its K/V lie elsewhere than those of other layers, in heads of its own; a later layer reads them again."""
    torch.manual_seed(2)
    heads = {"head_num": 1, "head_dim": 16, "swa_head_num": KV_HEADS}
    heads |= {"swa_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM}
    slots_of_rows = torch.randperm(30).view(3, 10).int() + 1
    pool = SWAKVPool(
        *(31, 12, 1, torch.float32),
        **heads,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
        enable_alt_stream=False,
    )
    backend = backend_of(pool, slots_of_rows)
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        part.k_buffer[0].fill_(torch.nan)
        part.v_buffer[0].fill_(torch.nan)
    keys, values = (torch.randn(8, KV_HEADS, HEAD_DIM) for _ in range(2))  # of eight positions, five of them stored
    slots, translation = backend.req_to_token[2, :8].long(), torch.zeros(33, dtype=torch.int64)
    translation[slots[2:]] = 1 + torch.randperm(12)[:6]  # of what windows have left there is nothing
    pool.register_mapping(translation)
    pool.swa_kv_pool.k_buffer[0][translation[slots[2:5]]] = keys[2:5]
    pool.swa_kv_pool.v_buffer[0][translation[slots[2:5]]] = values[2:5]
    layout = partly(DSparkVerifyInput, indptr=torch.tensor([0, 3]), draft_token_num=3)
    if translated:
        layout.slots_of_windows = translation[slots[5:]]
    of_request = {"req_pool_indices": torch.tensor([2]), "seq_lens": torch.tensor([5])}
    batch = forward(spec_info=layout, out_cache_loc=slots[5:], **of_request)
    q, layer = torch.randn(3, HEADS * HEAD_DIM), a_layer(keys_before=3)
    found = backend.forward_extend(q, keys[5:].flatten(1), values[5:].flatten(1), layer, batch)
    again = backend.forward_extend(q, None, None, layer, batch, save_kv_cache=False)
    ages = 5 + torch.arange(3)[:, None] - torch.arange(8)
    expected = dense_attention(q.view(3, -1, HEAD_DIM), keys, values, (ages >= 0) & (ages <= 3))
    for attended in (found, again):
        torch.testing.assert_close(attended.view(3, -1, HEAD_DIM).double(), expected, **FP32_TOL)
    assert pool.full_kv_pool.k_buffer[0].isnan().all()


@pytest.mark.parametrize("keys_before", [-1, 6])
def test_prompts_are_attended_in_the_tiles_of_verification(keys_before, monkeypatch):
    """With --enable-deterministic-inference on a GPU; without it they stay with SGLang's backend."""
    torch.manual_seed(2)
    slots, seen, attention = torch.randperm(60).view(2, 30).int() + 1, [], module.window_attention
    backend = backend_of(Pool(64, torch.float32), slots, deterministic=True)
    for user in (module, prompts):
        monkeypatch.setattr(user, "window_attention", lambda *a, **k: seen.append((a, k)) or attention(*a, **k))
    q, k, v = (torch.randn(45, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    requests, stored = torch.tensor([1, 0]), torch.cat([slots[1, 5:30], slots[0, :20]]).long()
    known = {"req_pool_indices": requests, "extend_prefix_lens_cpu": [5, 0], "extend_seq_lens_cpu": [25, 20]}
    batch = forward(ForwardMode.EXTEND, out_cache_loc=stored, **known)
    backend.init_forward_metadata(batch)
    whole = backend.forward_extend(q.clone(), k.clone(), v.clone(), a_layer((None, None), keys_before), batch)
    layout, rows = (
        partly(DSparkVerifyInput, indptr=torch.tensor([0, 3, 7]), draft_token_num=4),
        [20, 21, 22, 25, 26, 27, 28],
    )
    some = forward(
        spec_info=layout, req_pool_indices=requests, seq_lens=torch.tensor([25, 0]), out_cache_loc=stored[rows]
    )
    verified = backend.forward_extend(q[rows], k[rows], v[rows], a_layer((None, None), keys_before), some)
    torch.testing.assert_close(verified, whole[rows])
    assert len(seen) == 2
    for (_, kv, _, windows), how in seen:
        assert kv is None and windows.fixed_split == 512 and how["splits"] == 1
    assert backend.takes_prompts_of(None) and not backend_of(Pool(64, torch.float32), slots).takes_prompts_of(None)


def test_dummy_forwards_of_sglang_are_attended(monkeypatch):
    """It tunes kernels of experts with them, in a layout that has equal windows and no rows of requests."""
    backend = backend_of(Pool(8, torch.float32), torch.zeros(2, 16, dtype=torch.int32))
    given = dict.fromkeys(("token_to_kv_pool", "req_to_token_pool", "kv_index_translator", "kv_cache_dtype"))
    given |= {"prefill_attention_backend_str": "stock", "model_config": model_config()}
    with get_context().override_server_args():
        context = PhasedBackend(runner(**given), backend, backend).get_cuda_graph_seq_len_fill_value()
    batch = forward(
        spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=4),
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        seq_lens=torch.full((3,), context),
        out_cache_loc=torch.zeros(12, dtype=torch.int64),
    )
    seen = []

    def attend(q, kv, pool, windows, **how):
        seen.append((windows.indptr.tolist(), windows.width))
        return window_attention.reference(q, kv, pool, windows, **how)

    monkeypatch.setattr(module, "window_attention", attend)
    q, k, v = (torch.randn(12, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert backend.forward_extend(q, k, v, a_layer(), batch).isfinite().all()
    assert seen == [([0, 4, 8, 12], 4)]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float8_e4m3fn, (None, None)), (torch.float8_e4m3fn, (4.0, 0.25)), (torch.float8_e5m2, (4.0, 0.25))],
)
def test_an_eight_bit_cache_is_divided_once_and_read_back(dtype, scales):
    """A row sees of its neighbours what later steps see of them."""
    attended, (q, k, v), backend, windows, slots = verify(dtype, scales)
    pool, factors = backend.token_to_kv_pool, [scale or 1.0 for scale in scales]
    for stored, rows, factor in zip((pool.k, pool.v), (k, v), factors, strict=True):
        assert torch.equal(stored.float()[slots], heads_of(rows / factor).to(dtype).float())
    whole = [stored.float() * factor for stored, factor in zip((pool.k, pool.v), factors, strict=True)]
    rows = tuple(stored[slots] for stored in whole)
    expected = window_attention.reference(heads_of(q), rows, tuple(whole), windows, causal=True, scale=HEAD_DIM**-0.5)
    torch.testing.assert_close(heads_of(attended), expected)


def test_a_cache_that_cannot_be_read_is_refused():
    for dtype in (torch.float16, torch.bfloat16):
        check_pool(dtype, (8, 0))
    check_pool(torch.float8_e4m3fn, (8, 9))
    with pytest.raises(ConfigError, match=r"float8_e4m3fn on a GPU of compute capability 8\.6"):
        check_pool(torch.float8_e4m3fn, (8, 6))
    check_pool(torch.float8_e5m2, (8, 0))
    with pytest.raises(ConfigError, match="K/V cache in uint8; pass"):
        check_pool(torch.uint8, (9, 0))


def test_settings_reach_the_one_place_that_is_read():
    functions = [inspect.unwrap(function) for _, function in inspect.getmembers(ModelRunner, inspect.isfunction)]
    assert any("spec_aux_config" in function.__code__.co_names for function in functions)
    with_config = runner(spec_aux_config=(config := SpecAuxHiddenStateConfig()))
    target.request_capture(with_config, (1, 2))
    assert (config.dflash_use_aux_hidden_state, config.dflash_target_layer_ids) == (True, [1, 2])


@pytest.mark.parametrize("attributes", [{}, {"spec_aux_config": object()}])
def test_settings_that_nobody_reads_end_the_start(attributes):
    with pytest.raises(EngineError, match=r"has no dflash_use_aux_hidden_state in its"):
        target.request_capture(runner(**attributes), (1, 2))


def of_layers_with_windows(configurator, monkeypatch):
    """Return SGLang's size of a token in pools of heads of two sizes."""
    return HybridSWAPoolConfigurator(configurator)._cell_size


def of_layers_alike(configurator, monkeypatch):
    monkeypatch.setattr(DefaultPoolConfigurator, "_compute_cell_size", lambda self, configurator, layers: 1000)
    return DefaultPoolConfigurator(configurator)._cell_size


@pytest.fixture
def configurator(monkeypatch):
    """SGLang's, of a target with four layers, three of them with windows."""
    heads = {"head_dim": 32, "v_head_dim": 32, "swa_head_dim": 16, "swa_v_head_dim": 16}
    counts = {"get_num_kv_heads": lambda *ranks: 2, "get_swa_num_kv_heads": lambda *ranks: 4}
    layers = SimpleNamespace(full_attention_layer_ids=[3], swa_attention_layer_ids=[0, 1, 2], num_effective_layers=4)
    dtypes = {"model_dtype": torch.bfloat16, "kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "auto"}
    made = partly(KVCacheConfigurator, **dtypes, is_draft_worker=False, page_size=1, is_hybrid_swa=True)
    made.sliding_window_size = 8
    made.model_config = model_config(attention_arch=AttentionArch.MHA, **counts, **heads)
    made.server_args, made.layer_info = server_args(), layers
    made.dflash_draft_cell_size_per_token, made.spec_aux_config = None, SpecAuxHiddenStateConfig()
    made.spec_algorithm = SpeculativeAlgorithm.DFLASH
    settings = get_context().override_server_args(swa_full_tokens_ratio=0.5, max_total_tokens=100)
    with settings, get_parallel().override(attn_tp_size=1, attn_dcp_size=1):
        yield made


@pytest.mark.parametrize("token_size", [of_layers_alike, of_layers_with_windows])
def test_a_token_of_the_pool_has_room_for_its_draft_kv(token_size, configurator, monkeypatch):
    """The room is counted in bytes, because the layers of drafter and target differ in size."""
    without = token_size(configurator, monkeypatch)
    attach(configurator.server_args, DSparkServer(DSparkConfig(), None, dummy_draft=False))
    target.make_room(configurator, pre_model_load_memory=0)
    assert token_size(configurator, monkeypatch) == without
    drafter = ResolvedDrafter.read(GOLDEN / "vanilla_g7")
    attach(configurator.server_args, DSparkServer(DSparkConfig(), drafter, dummy_draft=False))
    target.make_room(configurator, pre_model_load_memory=0)
    config = drafter.config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert token_size(configurator, monkeypatch) == without + 2 * elements + 8  # in 16 bits, and the token itself
