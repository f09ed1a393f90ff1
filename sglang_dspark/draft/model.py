"""The whole draft model: context projection, block backbone and heads; and its K/V.

Letters in shapes: d hidden size, m tapped target layers, L draft layers, V vocabulary, v tokens that are proposed (V or
fewer), r Markov rank, n context rows, T block rows of all requests, hd head dim.

K/V of the drafter has one pool row per K/V slot of the target, so that prefix caching and eviction are shared.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from dspark_kernels import CommitRows, Dispatched, Weight, kv_inject, linear
from torch import Tensor, nn

from sglang_dspark.draft.backbone import (
    Attend,
    DecoderLayer,
    GemmaDecoderLayer,
    RotaryEmbedding,
    rotate,
    with_normed_values,
)
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.frozen_layers import (
    FusedLayer,
    Int8Linear,
    read_from,
    store_in_eight_bits,
    weights_below_each_other,
)
from sglang_dspark.draft.heads import ConfidenceHead, MarkovHead, build_markov_head
from sglang_dspark.errors import CheckpointError


def base_logits(hidden: Tensor, lm_head: nn.Linear | Int8Linear, config: DraftConfig) -> Tensor:
    """Return logits ``[T, v]`` of ``hidden [T, d]``, in the dtype of the LM head unless that has eight bits."""
    rows = hidden.to(lm_head.weight.dtype) if isinstance(lm_head, nn.Linear) else hidden
    logits, cap = lm_head(rows), config.final_logit_softcapping
    if config.output_multiplier != 1:
        logits = logits * config.output_multiplier
    return logits if cap is None else torch.tanh(logits / cap) * cap


class DraftModel(nn.Module):
    """A drafter of Qwen3 or Gemma 4 layers. Parameter names are exactly those of a DeepSpec checkpoint.

    The attention of :meth:`forward_block` and all K/V memory are the caller's. Embedding and LM head are the model's
    own (``own_embedding``, ``own_lm_head``) or the target's, see :meth:`bind_target`.

    Attributes:
        markov_head, confidence_head: None if the checkpoint has none.
        token_ids: [v] int64, ascending, the tokens that LM head and Markov biases have rows for; None for all of them.
        eight_bits: whether the layers' weights are stored in eight bits.
    """

    token_ids: Tensor | None

    def __init__(self, config: DraftConfig, *, own_embedding: bool = True, own_lm_head: bool = True) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d) if own_embedding else None
        self.lm_head = nn.Linear(d, config.num_proposed, bias=False) if own_lm_head else None
        self.fc = nn.Linear(config.num_taps * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            GemmaDecoderLayer(config) if config.backbone == "gemma4" else DecoderLayer(config, has_sinks=has_sinks)
            for has_sinks in config.sinks
        )
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.markov_head: MarkovHead | None = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = RotaryEmbedding(config)
        ids = None if config.draft_vocab_size is None else torch.empty(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("token_ids", ids, persistent=False)
        self.eight_bits = False
        self._embed_scale = 1.0
        self._target_embedding: Tensor | None = None
        self._target_lm_head: Tensor | None = None
        self._context_stack: _ContextStack | None = None
        self._fused_layers: list[FusedLayer] = []

    @property
    def decoder_layers(self) -> list[DecoderLayer | GemmaDecoderLayer]:
        """Return ``layers`` with their types."""
        return [cast("DecoderLayer | GemmaDecoderLayer", layer) for layer in self.layers]

    def project_context(self, features: Tensor) -> Tensor:
        """Project target features ``[n, m * d]`` (raw taps, ascending layers) to ``H_ctx [n, d]`` (Eq. 2)."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, h_ctx: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K and V that the context rows contribute to every layer (Eq. 3).

        ``input_layernorm`` does not touch context rows; K gets the layer's k_norm and RoPE, V neither (Gemma's has a
        norm without weights). All layers are projected in one GEMM.

        Args:
            h_ctx: ``[n, d]`` from :meth:`project_context`.
            positions: ``[n]`` absolute positions of the rows.

        Returns:
            ``(k, v)``, each ``[L, n, kv_heads, hd]``.
        """
        config = self.config
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        k, v = self.context_projection(h_ctx).unflatten(-1, shape).permute(2, 1, 0, 3, 4).unbind(0)
        k = F.rms_norm(k, (config.head_dim,), eps=config.rms_norm_eps) * self.context_k_norm[:, None, None]
        return rotate(k, *self.rotary(positions)), v

    def context_projection(self, h_ctx: Tensor) -> Tensor:
        """Return K before V of every layer for ``h_ctx [n, d]``: K not yet normed or rotated, V as it is stored.

        Returns:
            ``[n, L * 2 * kv_heads * hd]``.
        """
        stack = self._context_stack or self._stack_context_weights()
        projected = linear(h_ctx, stack.weight, stack.bias)
        return with_normed_values(projected, self.config) if self.config.backbone == "gemma4" else projected

    @property
    def context_k_norm(self) -> Tensor:
        """Return ``[L, hd]`` weights of the norm that every layer applies to K."""
        return (self._context_stack or self._stack_context_weights()).k_norm

    def forward_block(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the backbone over block rows. A frozen model on CUDA does so in fewer launches.

        Args:
            embeds: ``[..., n, d]`` embeddings of ``[anchor, MASK x (n - 1)]`` of each request.
            positions: ``[..., n]`` absolute positions, anchor position first.
            attend: see :data:`~sglang_dspark.draft.backbone.Attend`.

        Returns:
            ``[..., n, d]`` after the final norm. A slot predicts the token after its own position; in blocks whose
            first slot does not predict, it predicts the token at its position.
        """
        if not self._fused_layers:
            return self.forward_block_plain(embeds, positions, attend)
        return Dispatched(self.forward_block_fused, self.forward_block_plain)(embeds, positions, attend)

    def forward_block_plain(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run :meth:`forward_block` module by module."""
        cos, sin = self.rotary(positions.flatten())
        hidden = embeds.flatten(0, -2)
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, cos, sin, attend, embeds.shape[-2])
        return self.norm(hidden).view_as(embeds)

    def forward_block_fused(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run :meth:`forward_block` of a frozen model with Triton kernels; v reaches ``attend`` with rows apart."""
        hidden, positions = embeds.flatten(0, -2), positions.flatten()
        normed, width = self.decoder_layers[0].input_layernorm(hidden), embeds.shape[-2]
        for index, layer in enumerate(self._fused_layers):
            hidden, normed = layer.forward(index, hidden, normed, positions, self.rotary.inv_freq, attend, width)
        return normed.view_as(embeds)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings ``[..., d]`` of token ids of any shape, in the model's dtype."""
        embeds, own_scale = F.embedding(ids, self.embed_weight).to(self.norm.weight.dtype), self.config.embed_scale
        scale = self._embed_scale if own_scale is None else _rounded(own_scale, embeds.dtype)
        return embeds if scale == 1.0 else embeds * scale

    @property
    def embed_weight(self) -> Tensor:
        """Return ``[V, d]``, the model's own embedding or the target's."""
        own = self.embed_tokens
        return _present(self._target_embedding if own is None else own.weight, "embed_tokens.weight")

    @property
    def lm_head_weight(self) -> Tensor:
        """Return ``[v, d]``, the model's own LM head or the target's rows."""
        own = self.lm_head
        return _present(self._target_lm_head if own is None else own.weight, "lm_head.weight")

    def bind_target(
        self, embed_weight: Tensor | None, lm_head_weight: Tensor | None, *, embed_scale: float = 1.0
    ) -> tuple[str, ...]:
        """Read the target's embedding and LM head wherever the model has no different ones of its own.

        An own copy that equals the target's tensor (after a cast to its dtype) is dropped; the target's storage is
        shared.

        Args:
            embed_weight: ``[V, d]``, without padding rows; on the model's device. None if the target's cannot be
                read: the model's own is.
            lm_head_weight: ``[V, d]``, likewise.
            embed_scale: the factor that the target puts on what it reads of its embedding, as the model then does. An
                own embedding that differs from the target's is read as it is. Gemma's layers have a factor of their
                own, whatever they read.

        Returns:
            The names, out of ``embed_tokens.weight`` and ``lm_head.weight``, that are now read from the target.

        Raises:
            CheckpointError: a tensor does not have shape ``[vocab_size, hidden_size]``.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embed_weight), ("LM head", lm_head_weight)):
            if weight is not None and tuple(weight.shape) != expected:
                raise CheckpointError(
                    f"the target's {name} has shape {list(weight.shape)}, but the draft ({self.config.origin}) needs "
                    f"[vocab_size, hidden_size] = {list(expected)}; use the draft that was trained for this target"
                )
        shared = []
        if embed_weight is not None and (self.embed_tokens is None or is_copy(self.embed_tokens.weight, embed_weight)):
            self.embed_tokens, self._target_embedding = None, embed_weight.detach()
            self._embed_scale = embed_scale
            shared.append("embed_tokens.weight")
        if lm_head_weight is not None:
            rows = lm_head_weight if self.token_ids is None else lm_head_weight[self.token_ids]
            if self.lm_head is None or is_copy(self.lm_head.weight, rows):
                self.lm_head, self._target_lm_head = None, rows.detach()
                shared.append("lm_head.weight")
        return tuple(shared)

    def follow_target(self, embed_weight: Tensor | None, lm_head_weight: Tensor | None) -> None:
        """Renew in place what is read of the target, whose weights have changed, or the list of LM head rows.

        Captured graphs go on reading it.

        Args:
            embed_weight, lm_head_weight: as :meth:`bind_target` had them.
        """
        if embed_weight is not None:
            _renew(self._target_embedding, embed_weight)
        if lm_head_weight is not None:
            _renew(self._target_lm_head, lm_head_weight, self.token_ids)

    def freeze(self) -> "DraftModel":
        """Make the model a constant: evaluation mode, no gradients, and weights that are read together in one tensor.

        These are the K/V weights and biases of all layers, for :meth:`context_kv`, and of each layer K/V as well as
        gate and up, for :meth:`forward_block`. All stacks become the storage of the layers' own parameters: they cost
        no memory and follow an in-place load.
        """
        self.requires_grad_(False).eval()
        stack, number = self._stack_context_weights(), len(self.layers)
        weights: Sequence[Weight] = stack.weight.chunk(number)
        biases: Sequence[Tensor | None] = [None] * number if stack.bias is None else stack.bias.chunk(number)
        for layer, weight, bias, k_norm_weight in zip(self.decoder_layers, weights, biases, stack.k_norm, strict=True):
            read_from(layer.self_attn.context_projections, weight, bias)
            layer.self_attn.k_norm.weight.data = k_norm_weight
        # None of Gemma 4's, for which there are no such kernels.
        layers = [layer for layer in self.decoder_layers if isinstance(layer, DecoderLayer)]
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        self._fused_layers = [
            FusedLayer.build(*parts, self.config.rms_norm_eps)
            for parts in zip(layers, weights, biases, next_norms, strict=False)
        ]
        self._context_stack = stack
        return self

    @torch.no_grad()
    def store_in_eight_bits(self) -> "DraftModel":
        """Store the weights of a frozen model's layers and of its context projection in eight bits, for good."""
        self.eight_bits = True
        for name in ("fc", "layers"):
            store_in_eight_bits(self, name)
        return self.freeze()

    def requires_grad_(self, requires_grad: bool = True) -> "DraftModel":
        """Switch gradients as in torch; a frozen model that is to be trained again loses its constant stacks."""
        self._context_stack, self._fused_layers = None, []
        super().requires_grad_(requires_grad)
        return self

    def _stack_context_weights(self) -> "_ContextStack":
        attentions = [layer.self_attn for layer in self.decoder_layers]
        projections = [projection for attention in attentions for projection in attention.context_projections]
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        return _ContextStack(
            weights_below_each_other(projections),
            torch.cat(biases) if biases else None,
            torch.stack([a.k_norm.weight for a in attentions]),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DraftModel":
        # A cast or a move gives every parameter its own storage again, so a stack made before would be stale.
        self._context_stack, self._fused_layers = None, []
        super()._apply(fn, recurse)
        return self


class _ContextStack(NamedTuple):
    """Weights of all layers that context rows meet, in the order layer, K before V."""

    weight: Weight  # [L * 2 * kv_heads * hd, d], half of the rows if values are projected as keys are
    bias: Tensor | None  # [L * 2 * kv_heads * hd]
    k_norm: Tensor  # [L, hd]


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Return the scale as trainers cast it: in bfloat16, Gemma 4 12B's is 62, not 61.97."""
    return torch.tensor(scale, dtype=dtype).item()


def is_copy(own: Tensor, target: Tensor) -> bool:
    """Return whether a tensor equals the target's, after a cast to its dtype."""
    return torch.equal(own.detach().to(device=target.device, dtype=target.dtype), target)


def _renew(copy: Tensor | None, weight: Tensor, rows: Tensor | None = None) -> None:
    """Write ``weight``, or these rows of it, into a copy of earlier ones; what shares its storage has it already."""
    if copy is not None and copy.data_ptr() != weight.data_ptr():
        copy.copy_(weight if rows is None else weight[rows])


def _present(weight: Tensor | None, name: str) -> Tensor:
    if weight is None:
        raise CheckpointError(f"the draft checkpoint has no {name}: bind the target's with bind_target() first")
    return weight


class DraftCache:
    """Context K/V of all draft layers. Rows of a block being drafted are never stored.

    Slot 0 is padding, which SGLang's allocator never hands out.

    Attributes:
        k, v: [L, slots, kv_heads, hd] in the model's dtype.
        tokens: [slots] int64 tokens whose K/V the slots hold, -1 for parts of pictures.
    """

    def __init__(self, config: DraftConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.tokens = torch.full((num_slots,), -1, device=device)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the pool in bytes."""
        return self.k.nbytes + self.v.nbytes + self.tokens.nbytes

    def inject(
        self,
        drafter: DraftModel,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: CommitRows | None = None,
    ) -> None:
        """Store what target rows contribute to every layer: features [n, m * d], positions and slots [n] int64.

        ``rows`` says which of them are stored; None stores all.
        """
        projected = drafter.context_projection(drafter.project_context(features))
        norm = drafter.context_k_norm, drafter.config.rms_norm_eps
        kv_inject(projected, *norm, drafter.rotary.inv_freq, positions, slots, (self.k, self.v), rows)


def bytes_per_token(config: DraftConfig, dtype: torch.dtype) -> int:
    """Return the pool memory of one token in bytes."""
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return kv + torch.int64.itemsize
