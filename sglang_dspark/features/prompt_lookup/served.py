"""Prompt lookup in a scheduler: what came before in a text, or was named, is a candidate for what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dspark_kernels import Candidates, ChainRules, find_chains, usual_bounds
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.engine.batch import CachedByBatch, DSparkBatchResult, is_running, per_token, prompts_of
from sglang_dspark.engine.part import CandidateSource, Worker
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.prompt_lookup.answer_cache import AnswerCache
from sglang_dspark.features.prompt_lookup.forced import ForcedTokens
from sglang_dspark.features.prompt_lookup.keys import answer_key, lookup_options
from sglang_dspark.features.prompt_lookup.options import COUNTS
from sglang_dspark.features.prompt_lookup.rules import rules_of, with_forced
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.state import DecodeBatch


class PromptLookup(CandidateSource):
    """Look up the ends of requests' texts in the texts themselves, and in what their requests name.

    Args:
        answers: of earlier requests.
        forced: reads what grammars force.
        device: where steps are.
    """

    def __init__(self, answers: AnswerCache, forced: ForcedTokens, device: torch.device) -> None:
        self._answers, self._forced, self._device = answers, forced, device
        self._rules = CachedByBatch(self._rules_of)
        self._predicted = CachedByBatch(_with_predictions)

    @classmethod
    def of(cls, worker: Worker) -> PromptLookup:
        """Return the part of a worker."""
        target = worker.target_worker
        vocab_size = int(target.model_runner.model_config.vocab_size)
        options = worker.options
        answers = AnswerCache(10**6 * (options.answer_cache or 0), by_prompt=options.answer_cache_key == "prompt")
        return cls(answers, ForcedTokens(target.tokenizer, vocab_size, worker.max_verify + 1), worker.device)

    def _rules_of(self, reqs: Sequence[Req]) -> ChainRules | None:
        return rules_of(reqs, self._device, self._answers)

    def rules(self, batch: ScheduleBatch) -> ChainRules | None:
        reqs = batch.reqs
        rules = self._rules.read(reqs)
        if batch.has_grammar and any(forced := [self._forced.of(req) for req in reqs]):
            rules = with_forced(rules, reqs, forced, self._device)
        return rules

    def names_drafts(self, req: Req) -> bool:
        return lookup_options(req).names_drafts

    def find(self, step: DecodeBatch, slot_tokens: torch.Tensor, number: int) -> torch.Tensor:
        return _found(step, slot_tokens, number)

    def buffers(self, slots: int) -> StagedRules:
        return StagedRules(slots, self._device)

    @fenced("counts of predictions", instead=nothing)
    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Give the token behind a prompt its counts: SGLang streams such lists from their first place on."""
        prompts = prompts_of(batch)
        for place in self._predicted.read(prompts):
            _counts(prompts[place], 1)

    @fenced("counts of predictions", instead=nothing)
    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        for place in self._predicted.read(batch.reqs):
            if result.record is not None and is_running(batch.reqs[place]):
                _count(batch.reqs[place], result.record, place, len(tokens[place]))

    @fenced("counts of predictions", instead=nothing)
    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Give a token that came beside a prompt its counts; those of other steps have theirs."""
        for place in self._predicted.read(reqs):
            if place in running:
                _counts(reqs[place], 1)

    @fenced("answers to keep", instead=nothing)
    def request_ended(self, req: Req) -> None:
        """Keep the answer of a request that was not aborted, if it has a key."""
        key = answer_key(req, by_prompt=self._answers.by_prompt)
        if key and not isinstance(req.finished_reason, FINISH_ABORT):
            self._answers.keep(key, req.output_ids_through_stop)

    def flushed(self) -> None:
        self._answers.clear()

    weights_changed = flushed  # the target would answer otherwise


@fenced("candidates", instead=lambda step, tokens, number: Candidates.no_chains(len(step), number, tokens.device))
def _found(step: DecodeBatch, slot_tokens: torch.Tensor, number: int) -> torch.Tensor:
    return find_chains(step.requests, slot_tokens, number, step.rules)


def _with_predictions(reqs: Sequence[Req]) -> list[int]:
    """Return the places of requests that have a prediction."""
    return [place for place, req in enumerate(reqs) if lookup_options(req).predicted]


def _count(req: Req, record: StepRecord, place: int, committed: int) -> None:
    """Note for each token that a request has committed what it and those before it owe to its prediction."""
    entries = _counts(req, 0)
    accepted, rejected = entries[-1] if entries else (0, 0)
    verified = min(record.copied[place], record.verified[place])
    kept = min(verified, committed - 1)
    entries += [(accepted + min(token + 1, kept), rejected + verified - kept) for token in range(committed)]


def _counts(req: Req, coming: int) -> list[tuple[int, int]]:
    """Return the counts up to each output token of a request, and to so many that are about to come."""
    entries: list[tuple[int, int]] = per_token(req, COUNTS)
    entries += [entries[-1] if entries else (0, 0)] * (len(req.output_ids) + coming - len(entries))
    return entries


class StagedRules:
    """The bounds that captured searches read. Named texts have no bounded size, so steps that have some are launched.

    Args:
        slots: requests of the largest captured step.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._bounds = usual_bounds(device).repeat(slots, 1)
        self._asked = False  # whether the last step's requests had bounds of their own

    def stage(self, step: DecodeBatch) -> None:
        """Copy the bounds of a step."""
        if step.rules is not None:
            self._bounds[: len(step)] = step.rules.bounds
        elif self._asked:
            self._bounds.copy_(usual_bounds(self._bounds.device))
        self._asked = step.rules is not None

    def first(self, slots: int) -> ChainRules:
        """Return the staged rules of so many requests."""
        return ChainRules(self._bounds[:slots])
