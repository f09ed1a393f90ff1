"""Committed texts of the requests with a preset, and the drafts that their presets propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dspark_kernels import AcceptResult

from sglang_dspark.engine.scheduler.request_options import BatchOptions
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.proposals.proposer import Proposer, Proposers
from sglang_dspark.step.state import Copies, DecodeBatch
from sglang_dspark.step.transfers import host_index

UNITS_PER_STEP = 3072
"""Units of preparation, see :class:`Proposer`: about a millisecond. An n-gram is one unit; by default these are 1024
tokens of a prompt."""
_MIN_UNITS = 64  # for each text, so that the tokens of the last step are known at once


@dataclass
class _Text:
    """One request's output so far.

    Attributes:
        req: the request itself: a client may use its id again.
        num_tokens: output tokens that the proposer knows.
        last: tokens that the last step committed.
    """

    req: Req
    proposer: Proposer
    num_tokens: int = 0
    last: list[int] = field(default_factory=list)

    def catch_up(self, length: int, anchor: int) -> bool:
        """Take over what was committed since; return whether all ``length`` output tokens are known now.

        Args:
            anchor: the last of them.
        """
        tokens = list(self.req.output_ids[self.num_tokens : length])
        lack = length - self.num_tokens - len(tokens)
        if lack > 0:  # SGLang is a step behind
            tokens += (self.last or [anchor])[-lack:]
        self.last = []
        if length < self.num_tokens or self.num_tokens + len(tokens) != length:
            return False
        if tokens:
            # A request that was retracted drew its last token again.
            tokens[-1] = anchor
        self.proposer.extend(tokens)
        self.num_tokens = length
        return True


class PresetTexts:
    """Propose copied drafts for the requests that want them.

    Presets read tokens on the host. A step with such a request therefore waits until the device has committed the
    tokens of the step before, which SGLang has not seen yet under overlap; steps without one wait for nothing.

    Args:
        max_verify: most drafts that the server verifies per request and step.
        vocab_size: of the target.
    """

    def __init__(self, max_verify: int, vocab_size: int) -> None:
        self._max_verify = max_verify
        self._proposers = Proposers(vocab_size)
        self._texts: dict[str, _Text] = {}
        self._before: tuple[Sequence[Any], torch.Tensor] | None = None

    def propose(self, reqs: Sequence[Req], options: BatchOptions, step: DecodeBatch) -> Copies | None:
        """Return what the presets of a batch propose for the step ahead; None when they have nothing to say."""
        if not options.presets:
            self._texts = {}
            return None
        self._read_last_step()
        anchors, prefix_lens = step.anchors.tolist(), step.prefix_lens.tolist()
        # Texts of requests that are not in the batch are dropped: they have ended, or were retracted.
        before, self._texts = self._texts, {}
        proposals: list[list[int]] = [[] for _ in reqs]
        units = UNITS_PER_STEP
        for row in options.presets:
            req, wanted = reqs[row], options.each[row]
            length = prefix_lens[row] + 1 - len(req.origin_input_ids)
            text = before.get(req.rid)
            if text is None or text.req is not req or not text.catch_up(length, anchors[row]):
                text = _Text(req, self._proposers.make(wanted, req.origin_input_ids))
                if not text.catch_up(length, anchors[row]):
                    continue
            self._texts[req.rid] = text
            units -= text.proposer.prepare(max(units, _MIN_UNITS))
            proposals[row] = text.proposer.propose(wanted.copy_limit(self._max_verify))
        return _laid_out(proposals, step)

    def took(self, reqs: Sequence[Any], options: BatchOptions, accepted: AcceptResult) -> None:
        """Remember what a step commits, which the device may not have computed yet."""
        self._before = (list(reqs), accepted.out_tokens) if options.presets else None

    def _read_last_step(self) -> None:
        if self._before is None:
            return
        reqs, out_tokens = self._before
        self._before = None
        for req, tokens in zip(reqs, out_tokens.tolist(), strict=True):
            text = self._texts.get(req.rid)
            if text is not None and text.req is req:
                text.last = [token for token in tokens if token >= 0]


def _laid_out(proposals: Sequence[Sequence[int]], step: DecodeBatch) -> Copies | None:
    width = max(map(len, proposals))
    if width == 0:
        return None
    rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in proposals]
    return Copies(host_index(rows, step.anchors.device), tuple(map(len, proposals)))
