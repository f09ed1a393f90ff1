"""Start prompts in the order in which their first tokens are due, and cut the one that has begun for those before it.

A pass of SGLang's scheduler puts its queue in order, asks for the class of what fills the next batch from it, has that
one go on with the prompt that has begun, and takes prompts from the front. So the class is where all is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING
from weakref import ref

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_dspark.engine.compat.decoder import decoder_of
from sglang_dspark.engine.feature import part_of
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.features.promises.served import Promises, rows_of
from sglang_dspark.fence import fenced
from sglang_dspark.scheduling.first_tokens import starts_by

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


class LeavesRoom(PrefillAdder):
    """SGLang's own, which leaves room in the next chunk for prompts that have to start before it goes on.

    Attributes:
        rows: of these prompts, each of which needs room for all of its own: only one prompt at a time is cut.
    """

    rows: Sequence[int] = ()
    chunked_req_limit: int | None

    def made_room(self) -> None:
        """Take notice of room for the first of them at least."""

    def add_chunked_req(self, req: Req) -> Req | None:
        left = self.rem_chunk_tokens
        for rows in map(self.ceil_paged_tokens, self.rows):
            if left - rows < self.page_size:
                break
            left -= rows
        if left < self.rem_chunk_tokens:
            left = left // self.page_size * self.page_size
            self.chunked_req_limit = min(left, self.chunked_req_limit or left)  # SGLang's may leave room for others
            self.made_room()
        going_on: Req | None = super().add_chunked_req(req)
        return going_on

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Take no prompt that would have to be cut, too: SGLang would end the server."""
        rows = self.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
        if has_chunked_req and rows > self.rem_chunk_tokens:
            return AddReqResult.OTHER
        return super().add_one_req(req, has_chunked_req, truncation_align_size)


def start_by_promise(adder: type[PrefillAdder], scheduler: Scheduler) -> type[PrefillAdder]:
    """Put prompts that wait into the order in which they have to start; return the class that fills the next batch.

    Where no prompt has a promise, the order and the class are SGLang's. Ranks do as rank 0 does, whose clock counts.
    """
    decoder, queue = decoder_of(scheduler), scheduler.waiting_queue
    part = part_of(decoder.parts, Promises)
    if part is None or not part.promises_any(queue):
        return adder
    order, ahead = part.agreement.share(_planned(scheduler, part))
    queue[:] = [queue[place] for place in order]
    # SGLang takes none behind the first that something else keeps from starting.
    due = list(takewhile(lambda req: not part.had_room(req), queue[:ahead]))
    if not due:
        return adder
    first = ref(due[0])  # a class lives until it is collected, and its request with it

    def made_room(_adder: LeavesRoom) -> None:
        if (req := first()) is not None:
            part.made_room(req)

    return type(adder.__name__, (LeavesRoom, adder), {"rows": list(map(rows_of, due)), "made_room": made_room})


def _as_it_is(scheduler: Scheduler, part: Promises) -> tuple[list[int], int]:
    return list(range(len(scheduler.waiting_queue))), 0


@fenced("orders of prompts", instead=_as_it_is)
def _planned(scheduler: Scheduler, part: Promises) -> tuple[list[int], int]:
    """Return the places of SGLang's queue in the new order, and for how many the prompt that has begun leaves room.

    Priorities come before promises.
    """
    row_ms = part.row_ms
    queue, begun, order, due = scheduler.waiting_queue, scheduler.chunked_req, [], []

    def level(req: Req) -> int:
        return (req.priority or 0) * scheduler.policy.priority_sign if scheduler.enable_priority_scheduling else 0

    for priority, group in groupby(range(len(queue)), key=lambda place: level(queue[place])):
        places = list(group)
        by = dict(zip(places, starts_by([part.waiting(queue[place], row_ms) for place in places]), strict=True))
        places.sort(key=by.__getitem__)
        order += places
        due += [(priority, by[place]) for place in places]
    # SGLang takes more than one prompt of a batch with windows in part; and without a free row it takes none.
    free = scheduler.get_num_allocatable_reqs(scheduler.running_batch.batch_size())
    if begun is None or scheduler.is_hybrid_swa or free <= 0:
        return order, 0
    before = (level(begun), part.waiting(begun, row_ms).start_by_ms)
    return order, min(len(list(takewhile(before.__gt__, due))), free)
