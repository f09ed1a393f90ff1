"""One step of SGLang's own worker: what is proposed, and how much of it is verified.

SGLang's own simulation of acceptance keeps as many drafts of every request of a step, so that requests end together,
which real ones do not. With ``SGLANG_DSPARK_SIMULATE_ACCEPTANCE`` both workers draw from the same numbers, and take the
same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from dspark_kernels import DraftBlock, simulated_accept
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal, resolve_greedy_mask
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

from sglang_dspark.config import ENV_PREFIX, DSparkConfig
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.server import variables_of_sglang
from sglang_dspark.engine.sglang_types import ScheduleBatch, ServerArgs
from sglang_dspark.engine.worker_base import SimulatedAcceptance
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import Confidence, DraftOutput


class Rows(NamedTuple):
    """The rows that the worker's verifications may have.

    Attributes:
        window: the most rows of a request, its anchor included.
        by_request: whether each request has its own number of rows. Otherwise blocks are computed whole, and what is
            accepted ends where the rows of other requests would begin.
        tiers: rows that steps are padded to, ascending; empty if any number will do.
    """

    window: int
    by_request: bool
    tiers: Sequence[int] = ()

    def fit(self, requests: int) -> bool:
        """Return whether so many requests may verify as many drafts as they like."""
        return not self.tiers or requests * self.window <= self.tiers[-1]

    def number(self, requests: int, drafts: int | None) -> int:
        """Return the rows of a verification of so many drafts in all, padding included; None if all may be verified."""
        if drafts is None or not self.by_request:
            drafts = requests * (self.window - 1)
        return round_up_grid(requests + drafts, self.tiers) if self.tiers else requests + drafts


class ScheduledStep:
    """A step that follows a decision. The worker asks it for its proposal, then for the rows of its verification.

    Args:
        decision: of the step.
        requests: of the step.
        rows: that the worker's forwards may have.
        fixed_tokens: [bs, gamma] int64 tokens to verify instead of drafts; None drafts, or verifies only anchors.

    Attributes:
        verify_lens: [bs] int64 drafts verified per request.
        num_rows: of the verification, padding included.
        confidence: in the drafts; None if the decision needs none.
        anchors, drafts: [bs] and [bs, gamma] int64, once it has proposed.
    """

    def __init__(
        self, decision: StepDecision, requests: int, rows: Rows, fixed_tokens: torch.Tensor | None = None
    ) -> None:
        self.decision, self.rows = decision, rows
        self.verify_lens: torch.Tensor | None = None
        self.num_rows = requests * rows.window
        self.confidence: Confidence | None = None
        self.anchors = self.drafts = torch.empty(0)
        self._requests, self._fixed_tokens = requests, fixed_tokens
        self._is_whole = decision.is_fixed(requests) and decision.draft_len + 1 == rows.window
        self._logits: torch.Tensor | None = None

    def propose(self, draft: Callable[[], Any], anchors: torch.Tensor, sampling: Any) -> Any:
        """Return the worker's proposal; one that costs no forward if the step drafts nothing.

        The worker is not told the confidences: it would choose by them, and copy them to the host.

        Args:
            draft: drafts whole blocks.
            anchors: [bs] int64, the last token of every request.
            sampling: SGLang's ``SamplingBatchInfo``; None if all requests are greedy.
        """
        if self.decision.draft_len == 0 or self._fixed_tokens is not None:
            proposal = self._nothing(anchors, sampling)
        else:
            proposal = draft()
            if proposal.confidence_raw is not None:
                self._logits = proposal.confidence_raw.float()
            proposal = msgspec.structs.replace(proposal, confidence=None, confidence_raw=None)
        self.anchors, self.drafts = anchors, proposal.draft_block.draft_tokens
        if self.rows.by_request or self._is_whole:
            return proposal
        # What a graph of whole blocks accepts is not cut.
        return msgspec.structs.replace(proposal, folded=False, verify_ids=None)

    def _nothing(self, anchors: torch.Tensor, sampling: Any) -> DraftProposal:
        """Return tokens that nothing has drawn. Fixed beforehand, they are one-hot drafts, and exact if verified."""
        bs, gamma, device = self._requests, self.rows.window - 1, anchors.device
        tokens = self._fixed_tokens
        if tokens is None:
            tokens = torch.zeros((bs, gamma), dtype=torch.int64, device=device)
        block = DraftBlockResult(
            draft_tokens=tokens,
            corrected_logits=None,
            greedy_mask=resolve_greedy_mask(bs=bs, sampling_info=sampling, device=device),
            temperatures=torch.ones(bs, device=device),
            greedy_draft=True,
        )
        return DraftProposal(draft_block_ids=torch.cat([anchors.view(-1, 1), tokens[:, 1:]], dim=1), draft_block=block)

    def lay_out(self, forecast: Forecast, agreement: Agreement) -> RaggedVerifyLayout | None:
        """Return how many rows of each request count; None has the worker verify all that it was given.

        Args:
            forecast: turns logits of the confidence head into survivals.
            agreement: has all ranks take rank 0's order or lengths.
        """
        bs = self._requests
        selected = self.decision.select(self._selectable(forecast))
        agreement.broadcast_from_rank0(selected.synced)
        self.verify_lens = selected.verify_lens
        if not self.rows.fit(bs) or (self._is_whole and not self.rows.by_request):
            return None
        self.num_rows = self.rows.number(bs, self.decision.max_drafts(bs))
        return RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=self.verify_lens + 1, graph_num_tokens=self.num_rows
        )

    def _selectable(self, forecast: Forecast) -> DraftOutput:
        """Return the drafts as our selections take them."""
        bs, depth = self._requests, self.decision.draft_len
        logits = None if self._logits is None else self._logits[:, :depth]
        if depth and self.decision.with_confidence and self._fixed_tokens is None:
            self.confidence = forecast.predict(logits, bs, depth)
        block = DraftBlock(self.drafts[:, :depth], confidence_logits=logits)
        return DraftOutput(block, self.confidence, self.decision.draft_lens(bs))


_step: dict[str, Any] = {}
"""The draws of the step under way and the rows of its requests, for a function that is told neither."""


class SimulatedWorker(DSparkWorkerV2):
    """SGLang's own worker, whose drafts are kept at random: the same as ours keeps, where their times are compared."""

    def init_cuda_graphs(self) -> None:
        """Make the draws, once the worker is ready to serve."""
        super().init_cuda_graphs()
        self.simulated = simulated_acceptance(self)

    def forward_batch_generation(self, batch: ScheduleBatch, *args: object, **kwargs: object) -> Any:
        """Run one batch of the scheduler."""
        self.batch_comes(batch)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def batch_comes(self, batch: ScheduleBatch) -> None:
        """Note the keys of requests, which follow from their prompts, or whose drafts are judged next."""
        if batch.forward_mode.is_extend():
            self.simulated.prefill_comes(batch)
        else:
            _step.update(draws=self.simulated.draws, rows=batch.req_pool_indices)


def simulated_acceptance(worker: DSparkWorkerV2) -> SimulatedAcceptance:
    """Return the draws of a worker that is ready to serve.

    Raises:
        ConfigError: the text would be spoilt, or the worker accepts where the draws do not reach.
    """
    rates = DSparkConfig.resolve({}, foreign=variables_of_sglang(ENV_PREFIX)).acceptance_profile(worker.gamma)
    assert rates is not None, "the worker is chosen where acceptance is simulated"
    for what, found in {
        "--load-format dummy, since the text has no meaning": worker.server_args.load_format == "dummy",
        "SGLANG_RAGGED_VERIFY_MODE=static": worker._verify_planner.mode_value == "static",
        "SGLANG_SIMULATE_ACC_LEN unset": envs.SGLANG_SIMULATE_ACC_LEN.get() <= 0,
        "a verification that accepts outside of its graph": worker._verify_epilogue is None,
    }.items():
        if not found:
            raise ConfigError(
                f"{ENV_PREFIX}SIMULATE_ACCEPTANCE={rates[0]},... needs {what}; unset it, or start the server that way"
            )
    return SimulatedAcceptance(rates, worker.model_runner)


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    HookType.AFTER,
    where="simulated",
    reason="both workers shall keep the same drafts where their times are compared",
)
def choose_worker(chosen: type, algorithm: object, server_args: ServerArgs) -> type:
    """Have SGLang's own worker keep drafts as the draws say."""
    return SimulatedWorker if chosen is DSparkWorkerV2 else chosen


@hook(
    "sglang.srt.speculative.dspark_components.dspark_verify.build_accept_outs",
    HookType.AROUND,
    where="simulated",
    reason="SGLang's own simulation keeps as many drafts of every request",
)
def accept(
    original: Callable[..., Any],
    *,
    correct_len: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    bonus: torch.Tensor,
    **given: Any,
) -> Any:
    """Keep drafts as the draws say, after the token that SGLang's acceptance has drawn."""
    kept = simulated_accept(_step["draws"], _step["rows"], prefix_lens, draft_tokens, bonus)
    return original(
        correct_len=kept.accept_lens.to(correct_len.dtype),
        prefix_lens=prefix_lens,
        draft_tokens=draft_tokens,
        bonus=bonus,
        **given,
    )
