"""Refuse what replicas cannot have."""

from sglang_dspark.engine.feature import Check, LaunchContext, Stage


def nodes_of_replicas(context: LaunchContext) -> str | None:
    """Refuse replicas whose schedulers are on several nodes."""
    nodes, replicas = context.args.nnodes, context.args.dp_size
    if nodes == 1 or replicas == 1:
        return None
    return (
        f"DSPARK cannot run with --dp-size={replicas} and --nnodes={nodes}; start a server on each machine, with a "
        "router in front of them"
    )


CHECKS = (Check("nodes of replicas", Stage.OPTIONS, nodes_of_replicas),)
