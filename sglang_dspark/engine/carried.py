"""Fields of SGLang that carry what they were not made for, each with the functions that write and read it.

Nothing else puts anything into a field of SGLang in another sense than SGLang's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_dspark.declared import Scalar

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        BatchStrOutput,
        BatchTokenIDOutput,
        ReleaseMemoryOccupationReqInput,
        ReleaseMemoryOccupationReqOutput,
    )
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

_QUESTION, _ONLY_ASKS, _REFUSED = "dspark", "dspark-release-nothing", "requests are running"


def carry_counts(result: Any, verified: torch.Tensor, drafted: Sequence[int]) -> None:
    """Put on a result of SGLang's how many drafts were verified and drawn, for each request.

    ``cap_lens`` are SGLang's rows verified, which its log, its metrics and every answer show. ``block_accept_lens``, of
    another algorithm, carry drafts drawn: SGLang adds them up for a request, and its answer comes to the front end with
    the sum.
    """
    result.cap_lens, result.block_accept_lens = verified + 1, torch.tensor(drafted)


def drafted_tokens(outputs: BatchStrOutput | BatchTokenIDOutput, i: int) -> int:
    """Return the drafts drawn for a request of SGLang's outputs, over its whole answer."""
    return int(outputs.spec_num_block_accept_tokens[i])


def hide_drafted(reporter: SchedulerMetricsReporter) -> None:
    """Have SGLang's log and metrics not take drafts drawn for the accepted lengths of blocks."""
    reporter.spec_num_block_accept_tokens = 0


def id_of_question(question: str, fields: Mapping[str, Scalar]) -> str:
    """Return the id of SGLang's request for a scheduler's state that asks our question.

    Such a request carries nothing else, and no client can write it.
    """
    return json.dumps({_QUESTION: {"question": question, "fields": dict(fields)}})


def question_of(rid: str | None) -> tuple[str, dict[str, Scalar]] | None:
    """Return the question and what belongs to it, of a request for a scheduler's state; None if SGLang asks."""
    if rid is None:
        return None
    message = json.loads(rid)[_QUESTION]
    return message["question"], message["fields"]


def only_asking(asked: ReleaseMemoryOccupationReqInput) -> ReleaseMemoryOccupationReqInput:
    """Return a request to release memory that only asks whether there are requests, by its id."""
    return msgspec.structs.replace(asked, rid=_ONLY_ASKS)


def only_asks(asked: ReleaseMemoryOccupationReqInput) -> bool:
    """Return whether a request to release memory only asks."""
    return asked.rid == _ONLY_ASKS


def refusing(answer: ReleaseMemoryOccupationReqOutput) -> ReleaseMemoryOccupationReqOutput:
    """Return a scheduler's answer that says by its id, which SGLang leaves empty, that it has not released memory."""
    return msgspec.structs.replace(answer, rid=_REFUSED)


def refuses(answer: ReleaseMemoryOccupationReqOutput) -> bool:
    """Return whether a scheduler has not released memory."""
    return answer.rid == _REFUSED
