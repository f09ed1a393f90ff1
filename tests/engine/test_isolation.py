"""A forward in isolation: what SGLang's own function does, field by field, ours does."""

import inspect
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

from sglang_dspark.engine.scheduler.isolation import isolated, keep

SGLANG = contextmanager(inspect.unwrap(Scheduler._forward_isolation))
SGLANG_KEEPS = inspect.unwrap(Scheduler.record_batch_in_overlap)


@dataclass
class Sampling:
    """Of a batch, with its copy for a forward."""

    copies: int = 0

    def copy_for_forward(self):
        return Sampling(self.copies + 1)


def batch(sampling_info):
    """SGLang's own class; every field of it holds something."""
    made = ScheduleBatch.__new__(ScheduleBatch)
    for field in fields(ScheduleBatch):
        setattr(made, field.name, [field.name])
    made.sampling_info, made.spec_algorithm = sampling_info, SimpleNamespace(is_none=lambda: False)
    return made


def values(of: Any) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def scheduler(record):
    made = SimpleNamespace(batch_record_ct=1, batch_record_buf=[None, None])
    made.record_batch_in_overlap = lambda batch: record(made, batch)
    return made


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sampling_info", [None, Sampling()])
@pytest.mark.parametrize("fails", [True, False])
def test_isolation_equals_sglangs_own(overlap, sampling_info, fails):
    seen = []
    for isolation, record in ((SGLANG, SGLANG_KEEPS), (isolated, keep)):
        ours, keeper = batch(sampling_info), scheduler(record)
        before = values(ours)
        with suppress(ZeroDivisionError), isolation(keeper, ours, overlap=overlap):
            within = values(ours)
            ours.seq_lens = ours.spec_info = "another"
            ours.forward_mode = None
            assert not fails or 1 // 0
        after = values(ours)
        assert all(after[name] is value for name, value in before.items())
        held = keeper.batch_record_buf[0]
        assert (held is not None) == overlap
        within.pop("spec_algorithm")  # one for each batch
        held_values = None if held is None else {id(value) for value in held[1]}
        assert held is None or (held[0] is ours and all(id(value) in held_values for value in within.values()))
        seen.append((within, keeper.batch_record_ct, held is not None and len(held[1]), isinstance(held, list)))
    assert seen[0] == seen[1]


def test_what_a_worker_wants_held_is_appended():
    keeper = scheduler(keep)
    keeper.record_batch_in_overlap(batch(None))
    keeper.batch_record_buf[keeper.batch_record_ct].extend(["more"])
    assert keeper.batch_record_buf[0][2] == "more"
