"""Start prompts in the order in which their first tokens are due, and cut the one that has begun for those before it.

A pass of SGLang's scheduler puts its queue in order, asks for the class of what fills the next batch from it, has that
one go on with the prompt that has begun, and takes prompts from the front. So the class is where all is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.part import part_of
from sglang_dspark.engine.request_options import kept_by_request
from sglang_dspark.engine.scheduler import decoder_of
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.features.promises.served import Promises, patient_until_ms, rows_of
from sglang_dspark.fence import fenced
from sglang_dspark.scheduling.first_tokens import Due, starting_order

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


class LeavesRoom(PrefillAdder):
    """SGLang's own, which leaves room in the next chunk for prompts that have to start before it goes on.

    Attributes:
        part: takes note of it.
        due: these prompts, each of which needs room for all of its own: only one prompt at a time is cut.
    """

    part: Promises
    due: Sequence[Req] = ()
    chunked_req_limit: int | None

    def add_chunked_req(self, req: Req) -> Req | None:
        left = self.rem_chunk_tokens
        for waiting in self.due:
            _look_up(waiting, self.tree_cache)  # others may have filled or emptied the cache since
            rows = self.ceil_paged_tokens(rows_of(waiting))
            if left - rows < self.page_size:
                break
            left -= rows
        if left < self.rem_chunk_tokens:
            left = left // self.page_size * self.page_size
            self.chunked_req_limit = min(left, self.chunked_req_limit or left)  # SGLang's may leave room for others
            self.part.had_room.add(self.due[0])
        going_on: Req | None = super().add_chunked_req(req)
        return going_on

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Take no prompt that would have to be cut, too: SGLang would end the server."""
        rows = self.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
        if has_chunked_req and rows > self.rem_chunk_tokens:
            return AddReqResult.OTHER
        return super().add_one_req(req, has_chunked_req, truncation_align_size)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
    HookType.AFTER,
    where="scheduler",
    reason="SGLang's orders of prompts know no time by which a first token has to come",
)
def start_by_promise(adder: type[PrefillAdder], scheduler: Scheduler) -> Callable[..., PrefillAdder]:
    """Put prompts that wait into the order in which they have to start; return what makes the filler of the next batch.

    Where no prompt has a promise, the order and the class are SGLang's. Ranks do as rank 0 does, whose clock counts.
    """
    queue = scheduler.waiting_queue
    part = part_of(decoder_of(scheduler).parts, Promises)
    if part is None or not (places := part.out_of_turn(queue)):
        return adder
    order, due = part.agreement.share(_planned(scheduler, part, places))
    with_room = [queue[place] for place in due]
    queue[:] = [queue[place] for place in order]
    if not with_room:
        return adder

    leaves_room: type[LeavesRoom] = type(adder.__name__, (LeavesRoom, adder), {})

    def make(*args: object, **kwargs: object) -> LeavesRoom:
        made = leaves_room(*args, **kwargs)
        made.part, made.due = part, with_room
        return made

    return make


def _as_it_is(scheduler: Scheduler, part: Promises, places: Sequence[int]) -> tuple[list[int], list[int]]:
    return list(range(len(scheduler.waiting_queue))), []


@fenced("orders of prompts", instead=_as_it_is)
def _planned(scheduler: Scheduler, part: Promises, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of SGLang's queue in the new order, and those for which the prompt that has begun leaves room.

    Priorities come before promises.
    """
    queue, begun = scheduler.waiting_queue, scheduler.chunked_req

    def level(req: Req) -> int:
        return (req.priority or 0) * scheduler.policy.priority_sign if scheduler.enable_priority_scheduling else 0

    def due(place: int) -> Due:
        return level(queue[place]), patient_until_ms(queue[place])

    due_ms = {place: _due_ms(queue[place], part, scheduler.tree_cache) for place in places}
    # The one that has begun comes first: it leaves no room for others that are due when it is.
    promised = {} if begun is None else {len(queue): (level(begun), part.start_by_ms(begun))}
    promised |= {place: (level(queue[place]), ms) for place, ms in due_ms.items() if ms is not None}
    by_age = scheduler.policy.policy == CacheAgnosticPolicy.FCFS
    order = starting_order(len(queue) + (begun is not None), promised, due, by_age=by_age)
    if begun is None:
        return order, []
    ahead = order.index(len(queue))
    del order[ahead]
    # SGLang takes more than one prompt of a batch with windows in part.
    if scheduler.is_hybrid_swa:
        return order, []
    # Without a free row SGLang takes none, nor behind the first that something else keeps from starting.
    free = scheduler.get_num_allocatable_reqs(scheduler.running_batch.batch_size())
    taken = takewhile(lambda place: queue[place] not in part.had_room, _not_passed_over(scheduler, order[:ahead]))
    return order, list(islice(taken, max(0, free)))


def _due_ms(req: Req, part: Promises, cache: BasePrefixCache) -> float | None:
    """Return by when a request has to start that waits; None if it keeps SGLang's order."""
    return part.start_by_ms(req) if req.output_ids else _promised_start_ms(req, part, cache)


@kept_by_request
def _promised_start_ms(req: Req, part: Promises, cache: BasePrefixCache) -> float | None:
    if part.promised_ms(req) is None:
        return None
    if req.last_node is None:  # SGLang looks for prefixes only where its own order depends on them
        _look_up(req, cache)
    return part.start_by_ms(req)


def _look_up(req: Req, cache: BasePrefixCache) -> None:
    """Look for what SGLang's cache has of a prompt; of a streaming session, it would lend what only one may have."""
    if req.session is None or not req.session.streaming:
        match_kv_cache(req, cache)


def _not_passed_over(scheduler: Scheduler, places: Iterable[int]) -> Iterator[int]:
    """Drop the places of requests for whose adapters there is no room now: SGLang takes those behind them."""
    running = {req.lora_id for req in (*scheduler.running_batch.reqs, scheduler.chunked_req) if not req.finished()}
    for place in places:
        req = scheduler.waiting_queue[place]
        if not scheduler.enable_lora or scheduler.can_schedule_lora_req(req, running):
            running.add(req.lora_id)
            yield place
