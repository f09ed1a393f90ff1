"""The DSPARK worker: one decode step as its stages."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from dspark_kernels import Accepted, DraftBlock, accept_ref, markov_sample_ref

from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.engine.batch import DSparkBatchResult, make_rounds, read_decode_batch
from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.verify import run_verify
from sglang_dspark.engine.worker_base import Publish, SpecWorkerBase
from sglang_dspark.stats.counters import Counters
from sglang_dspark.worker.draft_attention import block_attend
from sglang_dspark.worker.draft_cache import PADDING_SLOT, DraftCache
from sglang_dspark.worker.state import DecodeBatch, VerifyPlan
from sglang_dspark.worker.verify_plan import uniform_plan

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


class DSparkWorker(SpecWorkerBase):
    """Draft with the DSpark drafter, verify with the target, commit what was accepted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        path = self.server_args.speculative_draft_model_path
        self.drafter = load_draft_model(path, dtype=self.target.dtype, device=self.device)
        shared = self.target.share_with(self.drafter)
        self.gamma = self.options.gamma(self.draft_config.block_size)
        self.verify_len = self.options.static_verify_len(self.gamma)
        self.counters = Counters(self.gamma)
        self._logged_at = time.monotonic()
        self._warned = False
        if self.tp_rank == 0:
            logger.info("DSPARK drafter %s loaded; read from the target: %s", path, ", ".join(shared) or "nothing")

    def allocate_draft_cache(self, num_slots: int) -> DraftCache:
        cache = DraftCache(self.draft_config, num_slots, self.target.dtype, self.device)
        logger.info("DSPARK draft K/V: %d slots, %.1f MiB", num_slots, cache.num_bytes / 2**20)
        return cache

    @torch.no_grad()
    def decode(self, batch: Any, publish: Publish) -> DSparkBatchResult:
        """Draft, plan, verify, accept, publish, commit."""
        rows = self.sampling.read(batch.reqs)
        step = read_decode_batch(
            batch,
            rows,
            seed=self.server_args.random_seed,
            step=self.step,
            gamma=self.gamma,
            verify_len=self.verify_len,
        )
        block = self.draft(step)
        draft_tokens = None if block is None else block.tokens
        plan = uniform_plan(step, draft_tokens, self.verify_len)
        output, used_graph = run_verify(self.target_worker, batch, step, plan)
        accepted = self.accept(step, block, plan, output.next_token_logits)
        new_seq_lens = step.prefix_lens + accepted.accepted_lens + 1
        publish(new_seq_lens)
        self.commit(plan, accepted, output.hidden_states)
        output.hidden_states = None
        return DSparkBatchResult(
            logits_output=output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=(accepted.accepted_lens + 1).to(torch.int32),
            can_run_cuda_graph=used_graph,
            next_draft_input=DSparkDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=new_seq_lens),
            speculative_num_draft_tokens=accepted.out_tokens.shape[1],
            new_seq_lens=new_seq_lens,
            rounds=make_rounds(batch.reqs, step, draft_tokens, plan),
        )

    def draft(self, step: DecodeBatch) -> DraftBlock | None:
        """Propose a block per request; None where the policy verifies nothing."""
        if self.verify_len == 0:
            return None
        bs, gamma, drafter = len(step), self.gamma, self.drafter
        ids = torch.full((bs, gamma), self.draft_config.mask_token_id, device=self.device)
        ids[:, 0] = step.anchors
        positions = step.block_positions[:, :gamma].reshape(-1)
        attend = block_attend(self.cache, self.req_to_token, step)
        hidden = drafter.forward_block(drafter.embed(ids.view(-1)), positions, attend).view(bs, gamma, -1)
        # The backbone needs the whole block (its slots see each other), the heads only what will be verified.
        hidden = hidden[:, : self.verify_len]
        base_logits = drafter.base_logits(hidden)
        # The policy `static` asks for no confidences.
        return markov_sample_ref(base_logits, hidden, step.anchors, drafter.markov, None, step.rows, step.keys)

    def accept(self, step: DecodeBatch, block: DraftBlock | None, plan: VerifyPlan, logits: torch.Tensor) -> Accepted:
        """Keep the drafts that the target agrees with and draw the token after them."""
        tokens = step.anchors.new_empty((len(step), 0)) if block is None else block.tokens
        probs = None if block is None else block.probs
        return accept_ref(tokens, plan.verify_lens, logits, plan.indptr, probs, step.rows, step.keys)

    def commit(self, plan: VerifyPlan, accepted: Accepted, captured: torch.Tensor) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request."""
        kept = plan.columns <= accepted.accepted_lens[plan.requests]
        if self.device.type == "cpu":
            rows = kept.nonzero().squeeze(1)
            self.inject_context(plan.input_ids[rows], captured[rows], plan.positions[rows], plan.slots[rows])
        else:
            # How many rows are kept is not known on the host: the others go to the padding slot.
            slots = torch.where(kept, plan.slots, PADDING_SLOT)
            self.inject_context(plan.input_ids, captured, plan.positions, slots)

    def inject_context(
        self, input_ids: torch.Tensor, captured: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        features = self.target.features(input_ids, captured)
        k, v = self.drafter.context_kv(self.drafter.project_context(features), positions)
        self.cache.write(slots, k, v)

    def on_rounds(self, num_drafted: int, verify_lens: list[int], accept_lens: list[int]) -> None:
        self.counters.record(num_drafted, verify_lens, accept_lens)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.info("DSPARK: %s", self.counters)
        if self.counters.looks_miswired and not self._warned:
            self._warned = True
            logger.warning(
                "DSPARK: the accept length stays at %.2f. The drafter hardly predicts this target: was it trained for "
                "it, and with DeepSpec's conventions (0-based target_layer_ids whose output is tapped, anchor in "
                "slot 0)? Output stays exact but decoding is slower than without speculation.",
                self.counters.accept_length,
            )

    def report(self) -> dict[str, Any]:
        return {"policy": self.options.schedule, "block_size": self.gamma, **self.counters.report()}
