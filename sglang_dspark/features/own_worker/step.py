"""One step of SGLang's own worker: what is proposed, and how much of it is verified."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from dspark_kernels import DraftBlock, StepRequests
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal, resolve_greedy_mask
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.features.own_worker.captured_rows import CapturedRows
from sglang_dspark.features.own_worker.widths import Widths
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import DraftOutput

Rows = CapturedRows | Widths
"""The rows that the worker's verifications may have: by request, or alike for all."""


class ScheduledStep:
    """A step by a decision, which the worker asks for its proposal and for the rows of its verification, in turn.

    Args:
        decision: of the step.
        requests: of the step.
        rows: that the worker's forwards may have.
        fillers: [bs, gamma] int64 tokens to verify instead of drafts; None drafts, or verifies anchors alone.

    Attributes:
        verify_lens: [bs] int64 drafts verified per request.
        num_rows: of the verification, padding included.
        confidence: in the drafts; None if the decision needs none.
        anchors: [bs] int64 of the requests, once it has proposed.
    """

    def __init__(self, decision: StepDecision, requests: int, rows: Rows, fillers: torch.Tensor | None = None) -> None:
        self.decision, self.rows = decision, rows
        self.verify_lens: torch.Tensor | None = None
        self.num_rows = requests * rows.window
        self.confidence: Confidence | None = None
        self._requests, self._fillers = requests, fillers
        self.anchors = self._drafts = torch.empty(0)
        self._logits: torch.Tensor | None = None

    def propose(self, draft: Callable[[], Any], anchors: torch.Tensor, sampling: Any) -> Any:
        """Return the worker's proposal; one that costs no forward if the step drafts nothing.

        The worker is not told the confidences: it would choose by them, and copy them to the host.

        Args:
            draft: drafts whole blocks.
            anchors: [bs] int64, the last token of every request.
            sampling: SGLang's ``SamplingBatchInfo``; None if all requests are greedy.
        """
        if self.decision.draft_len == 0 or self._fillers is not None:
            proposal = self._nothing(anchors, sampling)
        else:
            proposal = draft()
            if proposal.confidence_raw is not None:
                self._logits = proposal.confidence_raw.float()
            proposal = msgspec.structs.replace(proposal, confidence=None, confidence_raw=None)
        self.anchors, self._drafts = anchors, proposal.draft_block.draft_tokens
        return self.rows.take(proposal, self.decision, self._requests)

    @property
    def block(self) -> torch.Tensor:
        """Return [bs, 1 + gamma] anchors and drafts."""
        return torch.cat([self.anchors.view(-1, 1), self._drafts], dim=1)

    def _nothing(self, anchors: torch.Tensor, sampling: Any) -> DraftProposal:
        """Return tokens that nothing has drawn. Fixed beforehand, they are one-hot drafts, and exact if verified."""
        bs, gamma, device = self._requests, self.rows.window - 1, anchors.device
        tokens = self._fillers
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

    def lay_out(self, forecast: Forecast, agreement: Agreement, requests: StepRequests) -> RaggedVerifyLayout | None:
        """Return the rows of the verification; None has the worker verify all that it was given.

        Args:
            forecast: turns logits of the confidence head into survivals.
            agreement: has all ranks take rank 0's order or lengths.
            requests: of the step, whose anchors were proposed from.
        """
        bs = self._requests
        selected, drafts = self.decision.select(self._selectable(forecast)), self.decision.max_drafts(bs)
        agreement.adopt(selected.synced)
        total = None if drafts is None else bs + drafts
        layout, self.verify_lens, self.num_rows = self.rows.lay_out(selected, self._drafts, requests, total)
        return layout

    def _selectable(self, forecast: Forecast) -> DraftOutput:
        """Return the drafts as our selections take them."""
        bs, depth = self._requests, self.decision.draft_len
        logits = None if self._logits is None else self._logits[:, :depth]
        if depth and self.decision.with_confidence and self._fillers is None:
            self.confidence = forecast.predict(logits, bs, depth)
        block = DraftBlock(self._drafts[:, :depth], confidence_logits=logits)
        return DraftOutput(block, self.confidence, self.decision.draft_lens(bs))
