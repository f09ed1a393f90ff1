"""What a forward may change of SGLang's batch is put back behind it, and what it may still read is held.

SGLang does both with some calls per field of the batch. Here all fields are read in one, and written in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

_NAMES = tuple(field.name for field in fields(ScheduleBatch))
_read = attrgetter(*_NAMES)


@contextmanager
def isolated(scheduler: Any, batch: Any, *, overlap: bool) -> Iterator[None]:
    """SGLang's ``_forward_isolation`` of a server that speculates.

    The forward gets sampling parameters of its own. Behind it every field is what it was.

    Args:
        scheduler: SGLang's.
        batch: a ``ScheduleBatch``.
        overlap: whether what the forward reads has to be held until it is done.
    """
    before = _read(batch)
    if batch.sampling_info is not None:
        batch.sampling_info = batch.sampling_info.copy_for_forward()
    if overlap:
        scheduler.record_batch_in_overlap(batch)
    try:
        yield
    finally:
        vars(batch).update(zip(_NAMES, before, strict=True))


def keep(scheduler: Any, batch: Any) -> None:
    """SGLang's ``record_batch_in_overlap``: hold the batch and its fields while this step and the next one run."""
    scheduler.batch_record_ct = (scheduler.batch_record_ct + 1) % 2
    # A list: SGLang appends what a worker wants to be held as well.
    scheduler.batch_record_buf[scheduler.batch_record_ct] = [batch, _read(batch)]
