"""Targets that read pictures: rows of a verification stand after those of their own request.

Positions have three coordinates (mRoPE). After the pictures of a prompt all three coordinates of a token are its
position and a delta, which belongs to the request. Prefill writes it to a table on the device, from which steps read
it: eager ones and captured ones alike.
"""

from __future__ import annotations

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature, FlagRule
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ForwardBatch, ModelRunner, ScheduleBatch, ServerArgs
from sglang_dspark.step.packed import host_index
from sglang_dspark.step.state import VerifyPlan


class Positions(Part):
    """Keep the deltas of requests in a table of the target's runner, [request slots] int64.

    Args:
        runner: SGLang's, of the target.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @classmethod
    def of(cls, worker: Worker) -> Positions | None:
        """Return the part of a worker; None if positions have one coordinate."""
        runner = worker.model_runner
        return cls(runner) if runner.model_config.model_is_mrope else None

    def attention_made(self) -> None:
        """Make the table."""
        runner = self._runner
        slots = len(runner.req_to_token_pool.req_to_token)
        runner.mrope_deltas = torch.zeros(slots, dtype=torch.int64, device=runner.device)

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        """Enter the requests of a prefill. No host sync.

        A request slot that is taken again is entered again: every request passes a prefill.
        """
        deltas = [0 if inputs is None else int(inputs.mrope_position_delta) for inputs in batch.multimodal_inputs]
        table = self._runner.mrope_deltas
        table[batch.req_pool_indices] = host_index(deltas, table.device)

    def captured(self, requests: int, rows: int) -> Positions:
        return self

    def prepare(self, plan: VerifyPlan, forward_batch: ForwardBatch) -> None:
        """Give the rows of a captured verification their coordinates."""
        place_rows(forward_batch, self._runner)

    def stage(self, batch: ScheduleBatch | None) -> None:
        """Do nothing: prefills have entered the requests."""


@hook(
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
    HookType.REPLACE,
    where="scheduler",
    reason="if positions have three coordinates, SGLang assumes that a step verifies as many rows for every request",
    by=Moment.SOME_TIME,
)
def place_rows(
    forward_batch: ForwardBatch, runner: ModelRunner, batch: object = None, seq_positions: object = None
) -> None:
    """Give the rows of a verification their coordinates, [3, N] int64. No host sync; safe under graph capture."""
    deltas = runner.mrope_deltas[forward_batch.req_pool_indices][forward_batch.spec_info.requests]
    forward_batch.mrope_positions = (forward_batch.positions + deltas).repeat(3, 1)


@hook(
    "sglang.srt.managers.mm_utils.prepare_mm_inputs",
    HookType.AFTER,
    where="scheduler",
    reason="the embeddings of prompts with pictures, which a drafter may read, are memory that the target's layers "
    "add to",
    by=Moment.SOME_TIME,
)
def keep_embeddings(
    embeddings: torch.Tensor, input_ids: object, forward_batch: ForwardBatch, *args: object, **kwargs: object
) -> None:
    """Keep a copy of a prefill's embeddings [n, d] as they are before the first layer: pictures have no ids."""
    if forward_batch.mm_input_embeds is not None:
        forward_batch.mm_input_embeds = embeddings.clone()


_ENCODED_HERE = "drop the flag: a server with DSPARK encodes pictures itself"


def _reads_pictures(args: ServerArgs) -> bool:
    target = model_config_of(args)
    return bool(target.is_multimodal or target.model_is_mrope)


FEATURE = Feature(
    __name__,
    is_used=_reads_pictures,
    flag_rules=(
        FlagRule("language_only", (False,), _ENCODED_HERE),
        FlagRule("encoder_only", (False,), _ENCODED_HERE),
    ),
    part=Positions.of,
)
