"""Replicas of a server (``--dp-size``): none goes on without the others.

A server of which a replica is gone ends, as SGLang ends a server whose only scheduler is.
"""

import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Check, Feature, LaunchContext, Stage
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.scheduler import end_server

logger = logging.getLogger(__name__)


def nodes_of_replicas(context: LaunchContext) -> str | None:
    """Refuse replicas whose schedulers are on several nodes."""
    nodes, replicas = context.args.nnodes, context.args.dp_size
    if nodes == 1 or replicas == 1:
        return None
    return (
        f"DSPARK cannot run with --dp-size={replicas} and --nnodes={nodes}; start a server on each machine, with a "
        "router in front of them"
    )


GRACE_S = 2.0
"""Time that a server has to end by itself: one that is told to end kills its processes one after another."""


@hook(
    "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
    HookType.BEFORE,
    where="children",
    reason="SGLang does not notice that a scheduler was killed: all requests after the next one for it would hang",
    by=Moment.SOME_TIME,  # called in the process that starts schedulers
)
def watch_replicas(controller: Any) -> None:
    """Watch the schedulers that SGLang's controller has started. A hook before it passes on the first request."""
    arguments = (controller.scheduler_procs, end_server)
    Thread(target=end_with_the_first, args=arguments, name="dspark-watch-replicas", daemon=True).start()


def end_with_the_first(schedulers: Sequence[BaseProcess], end: Callable[[], None]) -> None:
    """Wait until one of these processes has failed, and call ``end``; do nothing if all end as they should."""
    left = list(schedulers)
    while left:
        ended = wait([scheduler.sentinel for scheduler in left])
        for gone in [scheduler for scheduler in left if scheduler.sentinel in ended]:
            left.remove(gone)
            # A process whose status another thread is collecting has none for a moment.
            for _ in range(100):
                if gone.exitcode is not None:
                    break
                time.sleep(0.01)
            if gone.exitcode != 0:
                time.sleep(GRACE_S)
                logger.error(
                    "DSPARK: process %d of a replica has ended with status %s. The server ends; start it again",
                    gone.pid,
                    gone.exitcode,
                )
                end()
                return


FEATURE = Feature(
    __name__,
    is_used=lambda args: args.dp_size > 1,
    checks=(Check("nodes of replicas", Stage.OPTIONS, nodes_of_replicas),),
)
