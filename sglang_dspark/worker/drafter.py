"""The drafter of a server, or that it has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from dspark_kernels import (
    AcceptResult,
    Candidates,
    CommitRows,
    DraftBlock,
    HeldRows,
    draft_block,
    hold_rows,
    prepare,
    runs_kernels,
)
from numpy.typing import NDArray
from torch import nn

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.draft.formats import Reading
from sglang_dspark.draft.formats.checkpoint import describe
from sglang_dspark.draft.model import DraftCache, DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.draft.weights import (
    TOKEN_IDS,
    ResolvedDrafter,
    check_alike,
    fitted,
    load_draft_model,
    random_draft_model,
    whole,
)
from sglang_dspark.engine.part import CandidateSource
from sglang_dspark.engine.target import Target
from sglang_dspark.errors import CheckpointError, ConfigError
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.step.state import DecodeBatch, VerifyPlan
from sglang_dspark.worker.draft_attention import block_attend

logger = logging.getLogger(__name__)

# Rows whose K/V is computed at once, and the largest non-speculative step whose rows wait for it: of more rows, a
# product reads its weights for enough of them.
_HELD, _STEP = 512, 64


class Drafter:
    """A draft network next to its target.

    Attributes:
        model: in the target's dtype.
        heads: what proposes tokens from its hidden states.
        gamma: drafts of a block; those after the checkpoint's are candidates.
        num_drawn: drafts of a block that the network proposes; 0 without a network.
        num_slots: rows of a block in the network: these drafts, and the anchor where that does not predict.
        cache: K/V of the context; made by :meth:`allocate`.
        window: of the context, that the network sees; None for all that its layers see.
        candidates: finds what competes with its tokens; None if nothing does.
        held: rows of non-speculative steps whose K/V is still to be computed.
    """

    cache: DraftCache
    held = 0

    def __init__(
        self,
        checkpoint: ResolvedDrafter,
        model: DraftModel,
        heads: ProposalHeads,
        *,
        gamma: int,
        device: torch.device,
        target: Target,
        window: DraftWindow | None = None,
        candidates: CandidateSource | None = None,
    ) -> None:
        self.config, self.model, self.heads, self.gamma = checkpoint.config, model, heads, gamma
        self.num_drawn, self.num_slots = self.config.drawn(gamma), self.config.num_slots(gamma)
        self.mask_token_id = self.config.mask_token_id
        self._device, self._checkpoint, self._target = device, checkpoint, target
        self.window, self.candidates = window, candidates
        self._held: HeldRows | None = None

    @classmethod
    def load(
        cls,
        resolved: ResolvedDrafter,
        options: DSparkConfig,
        model_runner: Any,
        device: torch.device,
        *,
        dummy: bool,
        window: DraftWindow | None,
        candidates: CandidateSource | None,
    ) -> Self:
        """Load a checkpoint, or random weights of its shape, next to the target of ``model_runner``.

        Raises:
            ConfigError: blocks are to be longer than the drafter's, and nothing finds candidates.
        """
        path, config = resolved.path, resolved.config
        gamma = options.gamma(config.gamma)
        if candidates is None and gamma > config.gamma and options.max_verify(gamma):
            raise ConfigError(
                f"{flag_name('block_size')}={gamma} exceeds the {config.gamma} drafts of a block of the draft "
                f"checkpoint, and nothing finds candidates for what is after it; pass {config.gamma} or less"
            )
        log_remarks(path, resolved.reading)
        target = Target(model_runner, config)
        if dummy:
            model = random_draft_model(config, dtype=target.dtype, device=device)
        else:
            model = load_draft_model(path, dtype=target.dtype, device=device, reading=resolved.reading)
            if (storage := resolved.reading.storage) is not None:
                logger.info("DSPARK drafter %s: %s", path, storage.dequantised(model.parameters()))
        shared = target.share_with(model)
        if options.draft_quantization == "int8":
            model.store_in_eight_bits()
            how = "also kept in" if runs_kernels(model.norm.weight) else "rounded to"
            logger.info("DSPARK drafter %s: weights of layers and heads are %s 8 bits", path, how)
        heads = ProposalHeads(model, resolved.token_ids)
        logger.info(
            "DSPARK drafter %s (%s format) loaded%s: %s; read from the target: %s",
            path,
            resolved.reading.format,
            ", with random weights" if dummy else "",
            describe(config),
            ", ".join(shared) or "nothing",
        )
        return cls(
            resolved,
            model,
            heads,
            gamma=gamma,
            device=device,
            target=target,
            window=window,
            candidates=candidates,
        )

    def follow_target(self) -> None:
        """Renew in place what was copied of the target's weights, which have changed; all ranks call it."""
        self._derive(*self._target.weights(self.model))

    def _derive(self, embedding: torch.Tensor | None, lm_head: torch.Tensor | None) -> None:
        """Derive in place all that is computed of weights or of the list of proposed tokens, which have changed.

        Nothing else is: what is read together shares the storage of the parameters (:meth:`DraftModel.freeze`).

        Args:
            embedding, lm_head: the target's, whole; None for what has not changed.
        """
        self.model.follow_target(embedding, lm_head)
        self.heads.follow()

    def _whole_lm_head(self) -> torch.Tensor | None:
        """Return the target's whole LM head if the network reads rows of it that a list names; all ranks call it."""
        if self.model.token_ids is None or self.model.lm_head is not None:
            return None
        return self._target.weights(self.model)[1]

    def write(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write new weights over the old ones, which captured graphs go on reading; some tensors or all of them.

        All ranks call it.

        Args:
            named: tensors by the names of the drafter's checkpoint.

        Raises:
            CheckpointError: one does not fit; nothing was written.
        """
        self._check_writable()
        head = self._whole_lm_head()
        rules, path = self._checkpoint.reading.rules, self._checkpoint.path
        self._write(fitted(self.model, rules, dict(named), path, head=head), head)

    def load_new(self, path: str) -> Callable[[], None]:
        """Load another checkpoint next to the weights that serve, and return what puts it in their place.

        All ranks call it.

        Raises:
            CheckpointError: it cannot be read, or is not of the serving drafter's form.
        """
        self._check_writable()
        head = self._whole_lm_head()  # before only one rank may fail
        folder = Path(path).expanduser()
        other = self._checkpoint.with_its_list(ResolvedDrafter.read(folder))
        check_alike(self._checkpoint, other)
        model = load_draft_model(folder, dtype=self._target.dtype, device=self._device, reading=other.reading)
        token_ids = model.token_ids
        if self.heads.has_others and other.token_ids is not None and not other.is_listed:
            token_ids = torch.tensor(other.token_ids)
        weights = whole(self.model, model, str(folder), head=head, token_ids=token_ids)

        def replace() -> None:
            self._write(weights, head)
            self._checkpoint, self.config, self.model.config = other, other.config, other.config

        return replace

    @property
    def linear_layers(self) -> list[nn.Linear]:
        """Return the layers that multiply by a weight that is not quantised, LM head included."""
        modules = (*self.model.fc.modules(), *self.model.layers.modules(), self.heads.lm_head)
        return [module for module in modules if isinstance(module, nn.Linear)]

    def _check_writable(self) -> None:
        if self.model.eight_bits:
            raise CheckpointError(
                f"{flag_name('draft_quantization')}=int8 keeps weights that were rounded at the start: restart the "
                "server with the new drafter"
            )

    def _write(self, weights: Mapping[str, torch.Tensor], head: torch.Tensor | None) -> None:
        tensors: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if self.heads.vocabulary is not None:
            tensors[TOKEN_IDS] = self.heads.vocabulary.token_ids
        with torch.no_grad():
            for name, weight in weights.items():
                tensors[name].copy_(weight)
        self._derive(None, head)

    @property
    def proposed(self) -> NDArray[np.bool_] | None:
        """Return :attr:`ProposalHeads.proposed`."""
        return self.heads.proposed

    def allocate(self, num_slots: int, dtype: torch.dtype) -> DraftCache:
        """Make the pool of K/V slots."""
        self.cache = DraftCache(self.config, num_slots, dtype, self._device)
        logger.info("DSPARK draft K/V: %d slots, %.1f MiB", num_slots, self.cache.num_bytes / 2**20)
        return self.cache

    def calibration(self, options: DSparkConfig, max_verify: int) -> OnlineCalibration | None:
        """Return the calibration of the confidence head; None without one."""
        if not self.config.predicts_acceptance:
            return None
        return OnlineCalibration.from_file(options.confidence_sts_path, self.num_drawn, max_verify)

    def propose(
        self,
        step: DecodeBatch,
        depth: int,
        with_confidence: bool,
        weights: torch.Tensor,
        layout: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> DraftBlock:
        """Run the network over the blocks of all requests of ``step`` and sample their first ``depth`` drafts.

        Args:
            weights: of candidates, see :class:`Candidates`.
            layout: ids and positions [bs, num_slots] of the blocks, the anchor and masks after it, where they are laid
                out already.
        """
        bs, model, first = len(step), self.model, self.config.first_slot
        ids, positions = layout or prepare(step.requests, self.num_slots, self.mask_token_id).block(bs)
        requests = step.requests if self.window is None else self.window.of(step.requests)
        attend = block_attend(self.cache, requests, self.num_slots, self.config)
        hidden = model.forward_block(model.embed(ids), positions, attend)
        # The backbone needs the whole block (its slots see each other), the heads only what may be verified. Two
        # dimensions, or the CPU's bfloat16 product with the LM head takes a path that is ten times slower.
        drawn = self.config.drawn(depth)
        hidden = hidden[:, first : first + drawn].reshape(bs * drawn, -1)
        # One more than slots: the token after a block shows how good candidates are, too.
        candidates = None
        if self.candidates is not None:
            candidates = Candidates(self.candidates.find(step, self.cache.tokens, depth + 1), weights)
        block = draft_block(
            self.heads.base_logits(hidden).view(bs, drawn, -1),
            hidden.view(bs, drawn, -1),
            step.anchors,
            self.heads.weights,
            step.rows,
            step.keys,
            candidates,
            with_confidence=with_confidence,
        )
        return block if candidates is None else block.with_tail(candidates, depth)

    def drafts_for(self, req: Any) -> bool:
        """Return whether anything is drafted for SGLang's request."""
        return True

    def hold_rows(self) -> None:
        """Hold rows of non-speculative steps from now on. Only drafts read the K/V, after :meth:`settle`."""
        logger.info("DSPARK draft K/V: steps that draft nothing leave theirs to the next draft, up to %d rows", _HELD)
        width = self.config.num_taps * self.config.hidden_size
        self._held = HeldRows.empty(_HELD, width, self._target.dtype, self._device)

    def committed(self, plan: VerifyPlan) -> None:
        """Count the rows of a non-speculative step that was launched, if they are held."""
        if self._holds(plan):
            self.held += len(plan.input_ids)
            if self.held > _HELD - _STEP:
                self.settle()

    def settle(self) -> None:
        """Write the K/V of the rows that are held: before a draft reads it, and before their slots can be others'."""
        if self.held:
            assert self._held is not None, "rows are held"
            self.cache.inject(self.model, *self._held.first(self.held))
            self.forget_held()

    def forget_held(self) -> None:
        """Drop the rows that are held, and begin to hold rows at the start of their memory."""
        self.held = 0
        if self._held is not None:
            self._held.end.zero_()

    def _holds(self, plan: VerifyPlan) -> bool:
        return self._held is not None and plan.width == 1 and len(plan.input_ids) <= _STEP

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, captured: torch.Tensor) -> None:
        """Write the K/V of anchors and accepted drafts of all requests, or hold the rows of a non-speculative step."""
        self.cache.tokens[plan.slots] = plan.input_ids
        if self._holds(plan):
            assert self._held is not None, "rows are held"
            hold_rows(self._target.features(plan.input_ids, captured), plan.positions, plan.slots, self._held)
            return
        kept, rows = CommitRows(plan.columns, plan.requests, accepted.accept_lens).narrowed()
        self.inject(plan.input_ids[kept], captured[kept], plan.positions[kept], plan.slots[kept], rows)

    def remember(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep tokens [n] of requests' texts with their slots [n]; those of pictures have ids of no vocabulary."""
        self.cache.tokens[slots] = torch.where(tokens < self.config.vocab_size, tokens, -1)

    def inject(
        self,
        input_ids: torch.Tensor,
        captured: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: CommitRows | None = None,
    ) -> None:
        """Write the K/V of target rows: [n] ids, [n, taps * d] captured states, [n] positions, [n] slots.

        Args:
            input_ids: or embeddings [n, d], see :meth:`Target.features`.
            rows: which of them count; None for all.
        """
        self.settle()
        self.cache.inject(self.model, self._target.features(input_ids, captured), positions, slots, rows)

    def describe(self) -> dict[str, Any] | None:
        """Return a description of the checkpoint, as JSON."""
        config, vocabulary = self.config, self.heads.vocabulary
        return {
            "path": self._checkpoint.path,
            "block_size": config.gamma,
            "num_hidden_layers": config.num_hidden_layers,
            "target_layer_ids": list(config.target_layer_ids),
            "markov_head_type": config.markov_head_type if config.markov_rank else None,
            "markov_rank": config.markov_rank,
            "confidence_head": config.predicts_acceptance,
            "vocab_size": config.vocab_size if vocabulary is None else len(vocabulary.token_ids),
            "quantization": "int8" if self.model.eight_bits else None,
            "window": None if self.window is None else asdict(self.window),
        }


def log_remarks(path: str, reading: Reading) -> None:
    """Log what reading the checkpoint at ``path`` made of keys that are left over, doubtful or unread."""
    for remark in reading.remarks:
        level = logging.WARNING if remark.doubtful else logging.INFO
        logger.log(level, "DSPARK drafter %s: %s", path, remark.sentence)
    if reading.unread_keys:
        unread = ", ".join(reading.unread_keys)
        logger.info("DSPARK drafter %s: these keys of config.json are not read: %s", path, unread)


class NoDrafter:
    """A server without a drafter: steps draft only the candidates that requests name.

    There is no draft K/V, and nothing is read from the target's layers.
    """

    num_drawn = held = 0
    proposed = None
    linear_layers: Sequence[nn.Linear] = ()
    mask_token_id = 0  # of staged blocks that are not read

    def __init__(
        self,
        options: DSparkConfig,
        vocab_size: int,
        device: torch.device,
        candidates: CandidateSource | None = None,
    ) -> None:
        self.candidates = candidates
        self.gamma = self.num_slots = options.gamma(None)
        self._vocab_size, self._device = vocab_size, device
        logger.info("DSPARK: no drafter; requests with a preset or prediction speculate")

    def follow_target(self) -> None:
        """Do nothing: nothing is read from the target."""

    def settle(self) -> None:
        """Do nothing: no row is held."""

    hold_rows = forget_held = settle

    def committed(self, plan: VerifyPlan) -> None:
        """Do nothing: no row is held."""

    def allocate(self, num_slots: int, dtype: torch.dtype) -> None:
        """Make room for the tokens of the slots: there is no K/V."""
        self._tokens = torch.full((num_slots,), -1, device=self._device)

    def calibration(self, options: DSparkConfig, max_verify: int) -> None:
        """Return None: there is nothing to calibrate."""

    def propose(self, step: DecodeBatch, depth: int, *_given: Any) -> DraftBlock:
        """Return the candidates that requests have named."""
        if self.candidates is None:
            chains = Candidates.no_chains(len(step), depth, self._device)
        else:
            chains = self.candidates.find(step, self._tokens, depth)
        return DraftBlock.of_chains(chains, depth)

    def drafts_for(self, req: Any) -> bool:
        """Return whether SGLang's request names candidates."""
        return self.candidates is not None and self.candidates.names_drafts(req)

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, captured: torch.Tensor) -> None:
        """Keep only the tokens: the target's K/V is all there is."""
        self._tokens[plan.slots] = plan.input_ids

    def remember(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep tokens [n] of requests' texts with their slots [n]; those of pictures have ids of no vocabulary."""
        self._tokens[slots] = torch.where(tokens < self._vocab_size, tokens, -1)

    def inject(self, *rows: Any) -> None:
        """Write nothing: there is no K/V."""

    def describe(self) -> None:
        """Return None: there is no checkpoint."""
