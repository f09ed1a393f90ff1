"""The target model as the drafter sees it: tapped hidden states, embedding and LM head.

SGLang is asked for the states and for memory next to its pools, and its layers for what verification has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpecInput

from sglang_dspark.draft.config import EMBEDDING_TAP, DraftConfig, lacks_own
from sglang_dspark.draft.families import family_of
from sglang_dspark.draft.model import DraftModel, bytes_per_token
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.server import attached_to_ours
from sglang_dspark.engine.sglang_types import KVCacheConfigurator, ModelRunner, ScheduleBatch
from sglang_dspark.engine.support import OTHER_RELEASE, installed_sglang
from sglang_dspark.errors import EngineError

logger = logging.getLogger(__name__)


def sliding_window(layer: RadixAttention) -> int | None:
    """Return the most keys that a row of this ``RadixAttention`` sees, its own among them; None if it sees all."""
    # SGLang leaves the row's own key out, and has -1 without a window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None


def row_bounds(layout: SpecInput, rows: torch.Tensor) -> torch.Tensor:
    """Return [bs + 1] int, the first row of each request of a verification, by its ``spec_info`` and its rows [N, ...].

    The dummy forwards by which SGLang tunes experts verify as many rows for every request.
    """
    indptr: torch.Tensor | None = getattr(layout, "indptr", None)
    return torch.arange(0, len(rows) + 1, layout.draft_token_num, device=rows.device) if indptr is None else indptr


def slot_translation(pool: KVCache) -> torch.Tensor | None:
    """Return the [slots + 1] int64 rows of the pool of layers with a window, by the slots that SGLang hands out.

    A slot without a row there has 0. None if ``pool`` holds all layers alike. The tensor stays where it is.
    """
    return pool.full_to_swa_index_mapping if isinstance(pool, SWAKVPool) else None


def translation_of_layer(layer: RadixAttention, pool: KVCache) -> torch.Tensor | None:
    """Return :func:`slot_translation` if the K/V that this ``RadixAttention`` reads lie in that pool, else None."""
    has_own = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
    return slot_translation(pool) if has_own else None


def kv_heads_of_layers(model: torch.nn.Module) -> set[int]:
    """Return the numbers of K/V heads that layers have on this rank; those with a window may have another one."""
    return {int(layer.tp_k_head_num) for layer in model.modules() if isinstance(layer, RadixAttention)}


_RECORD = "spec_aux_config"


def _set_required(owner: object, name: str, value: object) -> None:
    # One that SGLang reads elsewhere would go unnoticed until the first prefill, or until the memory is full.
    if not hasattr(owner, name):
        raise EngineError(
            f"sglang {installed_sglang()} has no {name} in its {type(owner).__name__}, where a drafter asks "
            f"for hidden states and for memory; {OTHER_RELEASE}"
        )
    setattr(owner, name, value)


def request_capture(runner: ModelRunner, layers: Sequence[int]) -> None:
    """Have the target's forwards return the outputs of these layers, 0-based.

    Raises:
        EngineError: this SGLang reads such settings elsewhere.
    """
    config = getattr(runner, _RECORD, None)
    _set_required(config, "dflash_use_aux_hidden_state", True)
    _set_required(config, "dflash_target_layer_ids", list(layers))


@hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
    HookType.BEFORE,
    where="scheduler",
    reason="SGLang reads how much K/V a drafter has from configs of its own drafters",
    by=Moment.READY,
)
def make_room(configurator: KVCacheConfigurator, *, pre_model_load_memory: int) -> None:
    """Have the target's K/V pools, which are about to be sized, leave room for the drafter's K/V.

    Every slot has a row there, whole on every rank, whatever layers of the target have a pool of their own.

    Raises:
        EngineError: this SGLang reads such settings elsewhere.
    """
    drafter = attached_to_ours(configurator.server_args).drafter
    if drafter is not None:
        _set_required(getattr(configurator, _RECORD, None), "dflash_draft_num_layers", drafter.config.num_hidden_layers)
        size = bytes_per_token(drafter.config, configurator.model_dtype)
        _set_required(configurator, "dflash_draft_cell_size_per_token", size)


def weights_region(runner: ModelRunner) -> AbstractContextManager[object]:
    """Return the context whose allocations leave the device's memory with the target's weights, and come back as are.

    The host keeps a copy: what brings the target new weights after a pause seldom brings the drafter's.
    """
    return runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True)


def kv_region(runner: ModelRunner) -> AbstractContextManager[object]:
    """Return the context whose allocations leave the device's memory with the K/V pools, and come back empty."""
    return runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)


def graph_context(runner: ModelRunner) -> Callable[..., AbstractContextManager[object]]:
    """Return ``torch.cuda.graph``, or what captures so that the graph's memory leaves the device with SGLang's.

    What a graph has written there before a pause, its replays read after it.
    """
    saver = runner.memory_saver_adapter
    if saver.enabled and envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get():
        return partial(saver.cuda_graph, tag=GPU_MEMORY_TYPE_CUDA_GRAPH, enable_cpu_backup=True)
    return torch.cuda.graph


def text_model(runner: ModelRunner) -> Any:
    """Return the model that reads text: the runner's, or a part of it if that one also reads images."""
    family = family_of(runner.model_config.hf_config.architectures)
    return attrgetter(family.text)(runner.model) if family.text else runner.model


def make_capturable(runner: ModelRunner) -> None:
    """Give the runner's model ``set_dflash_layers_to_capture``, and the one that reads text ``get_input_embeddings``.

    All of SGLang's methods take the 0-based layers whose outputs are wanted. Without an argument that of EAGLE3 chooses
    layers of its own, which DSPARK never does.
    """
    family, model, text = family_of(runner.model_config.hf_config.architectures), runner.model, text_model(runner)
    if family.text or family.capture == "eagle3":
        model.set_dflash_layers_to_capture = getattr(text, f"set_{family.capture}_layers_to_capture")
    if family.embedding:
        embedding = attrgetter(family.embedding)(text)
        text.get_input_embeddings = lambda: embedding


def capturing_forward(batch: ScheduleBatch, runner: ModelRunner) -> ForwardBatch:
    """Return the forward of a prefill that returns the tapped hidden states of all its tokens."""
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )


class Target:
    """Hold the loaded target of one rank.

    Attributes:
        model: SGLang's model, of text if it reads images, too.
    """

    def __init__(self, model_runner: ModelRunner, draft: DraftConfig) -> None:
        self._model_runner = model_runner
        self.model = text_model(model_runner)
        self._tp_group = get_parallel().tp_group
        self._layer_taps = [tap for tap in draft.target_layer_ids if tap != EMBEDDING_TAP]
        self._has_embedding_tap = EMBEDDING_TAP in draft.target_layer_ids
        self._hidden_size = draft.hidden_size
        self._vocab_size = draft.vocab_size
        make_capturable(model_runner)
        # The embedding output is looked up by features(): Llama's capture does not know it, and a model that is asked
        # for no layer at all returns a differently shaped result, so a lone tap -1 captures layer 0 and drops it.
        request_capture(model_runner, self._layer_taps or [0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target's weights; the drafter runs in the same."""
        return self._model_runner.dtype

    def share_with(self, drafter: DraftModel) -> tuple[str, ...]:
        """Let the drafter read the target's embedding and LM head; return the names of the shared tensors.

        A layer that is quantised or packed cannot be read: then the drafter's own is used.

        Under tensor parallelism each rank of the target has a part of their rows. The drafter gets them whole, on every
        rank: that costs memory once, where drafting from the parts would cost an all-reduce and an all-gather of
        [bs * depth, V] logits in every step.

        Raises:
            CheckpointError: the drafter lacks a tensor that it cannot read from this target.
        """
        scale = getattr(_without_adapters(self.model.get_input_embeddings()), "embed_scale", 1.0)
        shared = drafter.bind_target(*self.weights(drafter), embed_scale=float(scale))
        if self._tp_group.world_size > 1:
            read = {w.data_ptr(): w.nbytes for w in (drafter.embed_weight, drafter.lm_head_weight)}
            logger.info("DSPARK: whole embedding and LM head on every rank, %.1f MiB", sum(read.values()) / 2**20)
        return shared

    def weights(self, drafter: DraftModel) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the whole embedding and LM head [V, d]; None for what the drafter cannot read, and has itself.

        Raises:
            CheckpointError: it has not.
        """
        embedding, head = self._readable("embed_tokens", drafter), self._readable("lm_head", drafter)
        embed_weight = None if embedding is None else self._whole(embedding)
        if head is None or head is embedding:
            return embed_weight, None if head is None else embed_weight
        return embed_weight, self._whole(head)

    def _readable(self, name: str, drafter: DraftModel) -> torch.Tensor | None:
        """Return the [rows of this rank, d] weight of a layer; None if it is in a form that only the target can read.

        Raises:
            CheckpointError: in that case, if the drafter has no tensor of its own.
        """
        layer = _without_adapters(self.model.lm_head if name == "lm_head" else self.model.get_input_embeddings())
        weight: torch.Tensor | None = getattr(layer, "weight", None)
        if getattr(layer, "use_intel_amx_backend", False):
            reason = "is packed for AMX"
        elif weight is None or not self._is_plain(weight):
            reason = f"is quantised ({self._model_runner.model_config.quantization})"
        else:
            return weight
        if getattr(drafter, name) is None:
            raise lacks_own(drafter.config, name, reason)
        return None

    def _is_plain(self, weight: torch.Tensor) -> bool:
        """Return whether it is [V / ranks, d] in a dtype that is no code: those of quantised numbers have one byte."""
        rows = -(-self._vocab_size // self._tp_group.world_size)
        floats = weight.is_floating_point() and weight.element_size() > 1
        return floats and weight.dim() == 2 and weight.shape[0] >= rows and weight.shape[1] == self._hidden_size

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the [V, d] weight whose rows the ranks hold in equal parts, padding at the very end."""
        gathered: torch.Tensor = self._tp_group.all_gather(part.data, dim=0)
        return gathered[: self._vocab_size]

    def features(self, input_ids: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
        """Return drafter features of target rows.

        Args:
            input_ids: [n] tokens that went through the target, or [n, d] their embeddings if pictures are among
                them, whose ids no embedding has.
            captured: [n, taps * d] ``logits_output.hidden_states`` of that forward.

        Returns:
            [n, m * d], taps ascending.
        """
        captured = captured[:, : len(self._layer_taps) * self._hidden_size]
        if not self._has_embedding_tap:
            return captured
        if input_ids.is_floating_point():
            return torch.cat([input_ids, captured], dim=-1)
        embedding = _without_adapters(self.model.get_input_embeddings())
        return torch.cat([embedding(input_ids), captured], dim=-1)


def _without_adapters(layer: Any) -> Any:
    """Return the layer below the one that a server with LoRA adapters puts around it."""
    return getattr(layer, "base_layer", layer)
