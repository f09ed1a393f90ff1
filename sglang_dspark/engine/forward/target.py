"""The target model as the drafter sees it: tapped hidden states, embedding and LM head."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_dspark.draft.cache import bytes_per_token
from sglang_dspark.draft.config import EMBEDDING_TAP, DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.engine.compat.pools import make_room, request_capture
from sglang_dspark.engine.compat.ranks import tp_group
from sglang_dspark.engine.forward.capture import make_capturable, text_model
from sglang_dspark.errors import ConfigError

logger = logging.getLogger(__name__)


class Target:
    """Handle to the loaded target of one rank.

    Attributes:
        model: SGLang's model, of text where it reads images, too.
    """

    def __init__(self, model_runner: Any, draft: DraftConfig) -> None:
        self._model_runner = model_runner
        self.model = text_model(model_runner)
        self._tp_group = tp_group(model_runner)
        self._layer_taps = [tap for tap in draft.target_layer_ids if tap != EMBEDDING_TAP]
        self._has_embedding_tap = EMBEDDING_TAP in draft.target_layer_ids
        self._hidden_size = draft.hidden_size
        self._vocab_size = draft.vocab_size
        self._request_capture()
        self._account_for_draft_cache(draft)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target's weights; the drafter runs in the same."""
        return self._model_runner.dtype

    def share_with(self, drafter: DraftModel) -> tuple[str, ...]:
        """Let the drafter read the target's embedding and LM head; returns the names of the shared tensors.

        Under tensor parallelism each rank of the target has a part of their rows. The drafter gets them whole, on every
        rank: that costs memory once, where drafting from the parts would cost an all-reduce and an all-gather of
        [bs * depth, V] logits in every step.
        """
        embedding, head = self.model.get_input_embeddings(), self.model.lm_head
        for name, layer in (("embed_tokens", embedding), ("lm_head", head)):
            if getattr(layer, "use_intel_amx_backend", False):
                raise ConfigError(f"--device=cpu: the target's {name} is packed for AMX, which DSPARK cannot read yet")
        embed_weight = self._whole(embedding)
        head_weight = embed_weight if head.weight is embedding.weight else self._whole(head)
        shared = drafter.bind_target(embed_weight, head_weight)
        if self._tp_group.world_size > 1:
            read = {w.data_ptr(): w.nbytes for w in (drafter.embed_weight, drafter.lm_head_weight)}
            logger.info("DSPARK: whole embedding and LM head on every rank, %.1f MiB", sum(read.values()) / 2**20)
        return shared

    def _whole(self, layer: Any) -> torch.Tensor:
        """[V, d] weight of a layer whose ranks hold equal parts of the rows, padding at the very end."""
        gathered: torch.Tensor = self._tp_group.all_gather(layer.weight.data, dim=0)
        return gathered[: self._vocab_size]

    def features(self, input_ids: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
        """Drafter features of target rows.

        Args:
            input_ids: [n] tokens that went through the target.
            captured: [n, taps * d] ``logits_output.hidden_states`` of that forward.

        Returns:
            [n, m * d], taps ascending.
        """
        captured = captured[:, : len(self._layer_taps) * self._hidden_size]
        if not self._has_embedding_tap:
            return captured
        return torch.cat([self.model.get_input_embeddings()(input_ids), captured], dim=-1)

    def _request_capture(self) -> None:
        # The embedding output is looked up by features(): Llama's capture does not know it, and a model that is asked
        # for no layer at all returns a differently shaped result, so a lone tap -1 captures layer 0 and drops it.
        runner = self._model_runner
        make_capturable(runner)
        request_capture(runner, self._layer_taps or [0])

    def _account_for_draft_cache(self, draft: DraftConfig) -> None:
        # SGLang sizes its pool for whole layers beside the target's, each as large as one of them is on this rank. The
        # drafter's K/V is whole on every rank.
        runner = self._model_runner
        config = runner.model_config
        target_layer = (
            2 * config.get_num_kv_heads(self._tp_group.world_size) * config.head_dim * runner.kv_cache_dtype.itemsize
        )
        make_room(runner, -(-bytes_per_token(draft, runner.dtype) // target_layer))
