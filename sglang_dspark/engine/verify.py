"""Run the target over the rows to be verified, with attention of their own next to SGLang's attention of prompts."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import torch
from dspark_kernels import (
    AttentionLayout,
    PagedWindows,
    PromptWindows,
    VisibleKeys,
    attend_groups,
    attend_prompts,
    cut_prompts,
    fixed_split_for,
    tile_contexts,
    window_attention,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.engine.sglang_types import ForwardBatch, ModelRunner, TpModelWorker
from sglang_dspark.engine.target import row_bounds, sliding_window, slot_translation, translation_of_layer
from sglang_dspark.errors import ConfigError
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_READS_E4M3 = (8, 9)

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""

Tiles = Callable[[VisibleKeys, int, torch.dtype], AttentionLayout]
"""The layout of a forward on a CPU for layers of a kind: their keys, query heads per K/V head, and dtype."""


class LayerRows(NamedTuple):
    """The rows of a verification in one layer of the target.

    Attributes:
        queries: [rows, heads, head_dim].
        kv: keys and values of the rows, which the pools hold also; None if only the pools' count.
        pools: [slots, heads, head_dim] keys and values.
        scale: of scores.
        window: largest number of keys that a row sees, its own included; None for all.
        translation: [slots] int64 rows of its pool for all slots; None if they are the same.
        sinks: [heads] one more score of each head, without a value; None without.
    """

    queries: torch.Tensor
    kv: KV | None
    pools: KV
    scale: float
    window: int | None
    translation: torch.Tensor | None
    sinks: torch.Tensor | None


class PhasedBackend(HybridAttnBackend):
    """Encode prompts with ``prefill``, SGLang's own choice on a GPU, and verify with ``verify``.

    Unlike the base class it does not ask ``--speculative-attention-mode``: every decode forward is a verification.
    """

    def __init__(self, model_runner: ModelRunner, prefill: AttentionBackend, verify: AttentionBackend) -> None:
        super().__init__(model_runner, prefill_backend=prefill, decode_backend=verify)
        # SGLang would copy the lengths of every decode step to the host; prompts bring their own.
        self.needs_cpu_seq_lens = False
        of_sglang = model_runner.prefill_attention_backend_str
        self.prefill_attention_backend_str = verify.decode_attention_backend_str if prefill is verify else of_sglang
        self.decode_attention_backend_str = verify.decode_attention_backend_str
        self.use_captured_forward_metadata_for_breakable_cuda_graph = (
            prefill.use_captured_forward_metadata_for_breakable_cuda_graph
        )

    def _select_backend(self, forward_mode: ForwardMode) -> AttentionBackend:
        verifies = forward_mode.is_target_verify() or forward_mode.is_decode_or_idle()
        return self.decode_backend if verifies else self.prefill_backend

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: ForwardBatch) -> object:
        """Do what the backend of prompts does: no other forward is captured so."""
        return self.prefill_backend.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(self, *args: object, **kwargs: object) -> None:
        """Do what the backend of prompts does."""
        self.prefill_backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(*args, **kwargs)


class VerifyBackend(AttentionBackend):
    """Attend over the ragged rows of TARGET_VERIFY, as laid out in ``forward_batch.spec_info``, without a plan.

    SGLang's backends verify as many rows for every request. Ours does not know capped scores, and the architectures
    that are served have none (``draft.families``). Layers with a window may have a pool of their own, whose rows have
    other numbers.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the K/V of one target layer's rows and attend.

        Args:
            k, v: of the rows; None if the layer reads those of an earlier one, whose ``layer_id`` it has.
            sinks: [heads] one more score of each head of this rank, without a value.
        """
        pool, kv = self.token_to_kv_pool, None
        translation = translation_of_layer(layer, pool)
        # A pool of another dtype holds rounded numbers, divided by the layer's scales if its checkpoint has any.
        is_rounded = pool.dtype != q.dtype
        k_scale, v_scale = (layer.k_scale_float, layer.v_scale_float) if is_rounded else (None, None)
        if k is not None and v is not None:
            kv = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            if save_kv_cache:
                where = KVWriteLoc(forward_batch.out_cache_loc, _slots_of_windows(forward_batch, translation))
                # Divides k and v themselves: these are not read afterwards.
                pool.set_kv_buffer(layer, where, *kv, k_scale, v_scale)
        rows = LayerRows(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            None if is_rounded else kv,
            (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
            layer.scaling * (k_scale or 1.0),
            sliding_window(layer),
            translation,
            sinks,
        )
        attended = self._attend(rows, forward_batch)
        return (attended if v_scale is None else attended * v_scale).reshape(q.shape)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Lay out the rows of prompts, if they come here; a verification brings its layout."""
        verifies = forward_batch.forward_mode.is_target_verify()
        self._lay_out_prompts(forward_batch, None if verifies else forward_batch.extend_seq_lens_cpu)

    @abstractmethod
    def takes_prompts_of(self, stock: AttentionBackend) -> bool:
        """Return whether this backend encodes prompts in place of SGLang's."""

    @abstractmethod
    def _lay_out_prompts(self, forward_batch: ForwardBatch, lens: list[int] | None) -> None:
        """Prepare the attention of so many rows of each prompt, for all layers; None forgets the last prompts."""

    @abstractmethod
    def _attend(self, rows: LayerRows, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return [rows, heads, head_dim]."""


class CpuBackend(VerifyBackend):
    """Attention on a CPU, of prompts as of verification: the bits of a row are the same in both, and in every batch."""

    decode_attention_backend_str = "sdpa_tiles"
    _prompts: Tiles | None

    def takes_prompts_of(self, stock: AttentionBackend) -> bool:
        """Return whether SGLang's backend does the same for every layer, and more slowly."""
        return isinstance(stock, TorchNativeAttnBackend)

    def _lay_out_prompts(self, forward_batch: ForwardBatch, lens: list[int] | None) -> None:
        self._prompts = None
        if lens is not None:
            requests, prefixes = forward_batch.req_pool_indices.tolist(), forward_batch.extend_prefix_lens_cpu
            self._prompts = tiles_of(self.req_to_token, requests, prefixes, lens)

    def _attend(self, rows: LayerRows, forward_batch: ForwardBatch) -> torch.Tensor:
        tiles = forward_batch.spec_info.tiles if forward_batch.forward_mode.is_target_verify() else self._prompts
        heads_per_kv = rows.queries.shape[1] // rows.pools[0].shape[1]
        assert tiles is not None, "rows are laid out before a forward"
        layout = tiles(VisibleKeys(rows.window, rows.translation), heads_per_kv, rows.queries.dtype)
        return attend_groups(rows.queries, *rows.pools, layout, rows.scale, sinks=rows.sinks)


class CudaVerifyBackend(VerifyBackend):
    """Verification on a GPU, with the pools of all backends that ``PREFILL_BACKENDS`` names.

    Queries keep their dtype if the pool has eight bits. With ``--enable-deterministic-inference`` keys are summed in
    tiles at fixed positions, those of prompts too.
    """

    decode_attention_backend_str = "window_attention"
    _prompts: PromptWindows | None
    _fixed_split: int | None = None
    _splits: int | None = None

    def __init__(self, model_runner: ModelRunner) -> None:
        check_pool(model_runner.kv_cache_dtype, torch.cuda.get_device_capability())
        super().__init__(model_runner)
        if model_runner.server_args.enable_deterministic_inference:
            longest = self.req_to_token.shape[1]
            self._fixed_split = fixed_split_for(longest)
            self._splits = -(-longest // self._fixed_split)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the context of requests in SGLang's dummy forwards."""
        return 1

    def takes_prompts_of(self, stock: AttentionBackend) -> bool:
        """Return whether prompts are summed in the tiles of verification."""
        return self._fixed_split is not None

    def _lay_out_prompts(self, forward_batch: ForwardBatch, lens: list[int] | None) -> None:
        self._prompts = None
        if lens is not None and self._fixed_split is not None:
            prefixes = forward_batch.extend_prefix_lens_cpu
            self._prompts = cut_prompts(self.req_to_token, forward_batch.req_pool_indices, prefixes, lens)

    def _attend(self, rows: LayerRows, forward_batch: ForwardBatch) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify() and self._fixed_split is not None:
            assert self._prompts is not None, "prompts are laid out before a forward"
            return attend_prompts(
                rows.queries,
                rows.pools,
                self._prompts,
                scale=rows.scale,
                fixed_split=self._fixed_split,
                sinks=rows.sinks,
                sliding_window=rows.window,
                translation=rows.translation,
            )
        windows = PagedWindows(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            row_bounds(forward_batch.spec_info, rows.queries),
            forward_batch.spec_info.draft_token_num,
            sliding_window=rows.window,
            translation=rows.translation,
            fixed_split=self._fixed_split,
        )
        kv = rows.kv if self._fixed_split is None else None
        return window_attention(
            *(rows.queries, kv, rows.pools, windows),
            causal=True,
            scale=rows.scale,
            sinks=rows.sinks,
            splits=self._splits,
        )


def _slots_of_windows(forward_batch: ForwardBatch, translation: torch.Tensor | None) -> torch.Tensor | None:
    """Return where the rows' K/V lie in the pool of layers with a window; None if the layer is in no such pool."""
    if translation is None:
        return None
    # Translated once for all layers, except SGLang's dummy forwards.
    slots: torch.Tensor | None = getattr(forward_batch.spec_info, "slots_of_windows", None)
    return translation[forward_batch.out_cache_loc] if slots is None else slots


def as_without_dspark(runner: ModelRunner) -> AbstractContextManager[None]:
    """Return the context of a prefill: in it a model that asks for the backend of attention gets SGLang's own.

    Some ask for its class, and mask pictures by it.
    """
    backend = runner.attn_backend
    return forward_context(
        ForwardContext(attn_backend=backend.prefill_backend if isinstance(backend, PhasedBackend) else backend)
    )


def verify_with_prompts(runner: ModelRunner) -> None:
    """Put our attention of verification next to the target's backend, before any graph is captured."""
    ours = (CpuBackend if torch.device(runner.device).type == "cpu" else CudaVerifyBackend)(runner)
    runner.attn_backend = phased(runner, runner.attn_backend, ours)
    runner.kv_index_translator.bind_and_verify_backends([runner.attn_backend])


def phased(runner: ModelRunner, stock: AttentionBackend, ours: VerifyBackend) -> PhasedBackend:
    """Return what verifies with our backend, and encodes prompts with SGLang's or with ours."""
    return PhasedBackend(runner, ours if ours.takes_prompts_of(stock) else stock, ours)


def encodes_prompts(runner: ModelRunner) -> bool:
    """Return whether all layers of a target attend over prompts as over rows of a verification."""
    backend = runner.attn_backend
    return isinstance(backend, PhasedBackend) and backend.prefill_backend is backend.decode_backend


def check_pool(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Refuse a K/V cache that the kernels of verification cannot read; ``auto`` may stand for one of a checkpoint.

    Raises:
        ConfigError: naming the dtype and the remedy.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(f"DSPARK cannot run with a K/V cache in {name}; pass --kv-cache-dtype bfloat16 or fp8_e4m3")
    if dtype == torch.float8_e4m3fn and capability < _READS_E4M3:
        raise ConfigError(
            f"DSPARK cannot run with a K/V cache in {name} on a GPU of compute capability "
            f"{'.'.join(map(str, capability))}, which is below 8.9; pass --kv-cache-dtype bfloat16"
        )


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input, with the layout of ragged rows.

    Attributes:
        indptr: [bs + 1] int64, first row of each request; what :class:`CudaVerifyBackend` reads.
        requests: [N] int64, request of each row.
        tiles: what :class:`CpuBackend` reads.
        slots_of_windows: [N] int64, where the rows' K/V lie in the pool of layers with a window; None if there is none.
        advance: what becomes :attr:`TargetOutput.advance`; set by backends of layers that keep something of the rows.
    """

    indptr: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    tiles: Tiles | None = None
    slots_of_windows: torch.Tensor | None = None
    advance: Callable[[torch.Tensor], None] | None = None

    @classmethod
    def of(cls, plan: VerifyPlan) -> Self:
        """Return the layout of a plan's rows."""
        return cls(
            draft_token=plan.input_ids,
            positions=plan.positions,
            draft_token_num=plan.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            indptr=plan.indptr,
            requests=plan.requests,
        )


def slots_of_windows(runner: ModelRunner, slots: torch.Tensor) -> torch.Tensor | None:
    """Return :attr:`DSparkVerifyInput.slots_of_windows` of rows with these slots [N]."""
    translation = slot_translation(runner.token_to_kv_pool)
    return None if translation is None else translation[slots]


def run_verify(target_worker: TpModelWorker, decode: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
    """Run the target over ``plan``'s tokens, eagerly."""
    batch = decode.batch
    verify_input = DSparkVerifyInput.of(plan)
    verify_input.slots_of_windows = slots_of_windows(target_worker.model_runner, plan.slots)
    if plan.verify_lens.device.type == "cpu":
        verify_input.tiles = tiles_of(
            target_worker.model_runner.req_to_token_pool.req_to_token,
            decode.req_pool_indices.tolist(),
            decode.prefix_lens.tolist(),
            [verify_len + 1 for verify_len in plan.verify_lens.tolist()],
        )
    batch.out_cache_loc = plan.slots
    # Backends that plan on the host need a bound of context plus window. SGLang restores the batch's fields afterwards.
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + plan.width
    else:
        batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    output = result.logits_output
    captured, output.hidden_states = output.hidden_states, None
    return TargetOutput(output, captured, verify_input.advance)


def tiles_of(
    req_to_token: torch.Tensor, requests: Sequence[int], prefix_lens: Sequence[int], query_lens: Sequence[int]
) -> Tiles:
    """Return the layout of rows after prefixes, made once for each kind of layer."""
    key_lens = [prefix + queries for prefix, queries in zip(prefix_lens, query_lens, strict=True)]

    @cache
    def tiles(visible: VisibleKeys, heads_per_kv: int, dtype: torch.dtype) -> AttentionLayout:
        return tile_contexts(
            req_to_token, requests, key_lens, query_lens, visible, heads_per_kv=heads_per_kv, dtype=dtype
        )

    return tiles
