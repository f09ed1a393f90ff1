"""A server of several nodes: all are started alike, and none goes on without the others."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.nnodes > 1,
    checks="checks.CHECKS",
    part="watch.join_nodes",
)
