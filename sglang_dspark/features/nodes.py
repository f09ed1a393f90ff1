"""A server of several nodes: all are started alike, and none goes on without the others.

A rank that waits for a dead one waits as long as its collective does: minutes under NCCL, without end for a message on
the host. On one node SGLang's front end sees the dead process. On several, each front end watches the processes of its
own node, and all but the first have none that watches at all. So every rank of another node keeps a connection to rank
0, over which nothing is ever sent, and which breaks when either dies.
"""

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import distributed

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.engine.feature import Check, Feature, LaunchContext, Stage
from sglang_dspark.engine.part import Worker
from sglang_dspark.engine.scheduler import end_server
from sglang_dspark.engine.server import DSparkServer
from sglang_dspark.engine.support import versions
from sglang_dspark.errors import ConfigError

logger = logging.getLogger(__name__)


def fallback_of_nodes(context: LaunchContext) -> str | None:
    """Refuse nodes of which some could fall back and others not."""
    if context.args.nnodes == 1 or context.server.config.fallback != "target-only":
        return None
    return (
        f"{flag_name('fallback')}=target-only cannot be combined with --nnodes={context.args.nnodes}: if only some "
        "nodes fall back, the server deadlocks; drop the flag"
    )


GRACE_S = 5.0
"""Time that a node has to end by itself: the ranks of a server that is told to shut down end one after another."""
_FOR_EVER = timedelta(days=3650)
_MISSING = "nothing"
# Each node may keep these files elsewhere: rank 0 reads the table for all, and what the others say is compared.
_OF_EACH_NODE = ("sps_table_path", "confidence_sts_path", "draft_vocabulary")


@dataclass(frozen=True)
class Nodes:
    """The nodes of one server, as its ranks see them.

    Attributes:
        hosts: names of the nodes that ranks 0, 1, ... run on.
        per_node: ranks of each node.
    """

    hosts: Sequence[str]
    per_node: int

    def of(self, rank: int) -> int:
        """Return the ``--node-rank`` of this rank."""
        return rank // self.per_node

    def watched_by(self, rank: int) -> list[int]:
        """Return the ranks of other nodes that ``rank`` has to watch: all for rank 0, which all others watch."""
        here = self.of(rank)
        if here:
            return [0]
        return [other for other in range(len(self.hosts)) if self.of(other) != here] if rank == 0 else []

    def loss_of(self, rank: int) -> str:
        """Return the line that the other ranks log when ``rank`` is gone."""
        node = self.of(rank)
        return (
            f"DSPARK: node {node} ({self.hosts[rank]}) has ended or cannot be reached: its rank {rank} has closed the "
            f"connection. This node ends, for a step needs every rank; the log of node {node} says more. Start all "
            "nodes again"
        )


def check_alike(facts: Sequence[Mapping[str, object]], nodes: Nodes) -> None:
    """Refuse nodes that were started differently.

    Args:
        facts: of each rank, by name of a flag or a package.

    Raises:
        ConfigError: names the first difference. Raised on every rank, so that every node's log has it.
    """
    for rank, found in enumerate(facts):
        for name in {**facts[0], **found}:
            # Another build of this version may have other options.
            here, there = facts[0].get(name, _MISSING), found.get(name, _MISSING)
            if here != there:
                raise ConfigError(
                    f"node {nodes.of(rank)} ({nodes.hosts[rank]}) has {name}={there} and node 0 "
                    f"({nodes.hosts[0]}) {name}={here}; start all nodes alike"
                )


def join_nodes(worker: Worker) -> None:
    """Join the nodes of a worker's server; nothing is left to do afterwards.

    Raises:
        ConfigError: see :func:`check_alike`.
    """
    watch_nodes(get_parallel().tp_group, worker.server_args.nnodes, to_have_in_common(worker.settled), end_server)


def watch_nodes(group: Any, nnodes: int, facts: Mapping[str, object], end: Callable[[], None]) -> None:
    """Compare the nodes of a server, and notice from now on when one of them is gone. All ranks call it together.

    Args:
        group: SGLang's ``GroupCoordinator`` of all ranks.
        nnodes: number of nodes.
        facts: what all of them must have in common.
        end: ends this node's part of the server; called in a thread.

    Raises:
        ConfigError: see :func:`check_alike`.
    """
    told = group.all_gather_object((socket.gethostname(), dict(facts)))
    nodes = Nodes([host for host, _ in told], len(told) // nnodes)
    line = distributed.new_group(group.ranks, backend="gloo", timeout=_FOR_EVER)
    for rank in nodes.watched_by(group.rank_in_group):
        arguments = (line, group.ranks[rank], nodes.loss_of(rank), end)
        Thread(target=_watch, args=arguments, name=f"dspark-watch-rank-{rank}", daemon=True).start()
    check_alike([fact for _, fact in told], nodes)
    logger.info("DSPARK: %d nodes: %s", nnodes, ", ".join(nodes.hosts[:: nodes.per_node]))


def _watch(line: Any, rank: int, loss: str, end: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the connection is closed
        distributed.recv(torch.empty(1, device="cpu"), src=rank, group=line)
    logger.error(loss)
    time.sleep(GRACE_S)
    end()


def to_have_in_common(settled: DSparkServer) -> dict[str, object]:
    """Return the settings that all nodes of a server must share, by the name that a user knows."""
    names = [option.name for option in fields(DSparkConfig) if option.name not in _OF_EACH_NODE]
    return {
        **versions(),
        **{flag_name(name): getattr(settled.config, name) for name in names},
        "--speculative-draft-model-path": _drafter(settled),
        flag_name("confidence_sts_path"): _temperatures(settled.config.confidence_sts_path),
    }


def _temperatures(path: str | None) -> str:
    """Return what identifies the content of a file."""
    return "none" if path is None else f"a file of content {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"


def _drafter(settled: DSparkServer) -> str:
    """Return what identifies the drafter, for nodes may keep it in different folders."""
    drafter = settled.drafter
    if drafter is None:
        return "none"
    shape = hashlib.sha256(repr((drafter.config, drafter.token_ids)).encode()).hexdigest()[:12]
    return f"a drafter of configuration {shape}"


FEATURE = Feature(
    __name__,
    is_used=lambda args: args.nnodes > 1,
    checks=(Check("fallback of nodes", Stage.OPTIONS, fallback_of_nodes),),
    part=join_nodes,
)
