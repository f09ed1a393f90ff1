"""A server of several nodes: all are started alike, and none goes on without the others."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.nodes.checks import CHECKS
from sglang_dspark.features.nodes.watch import join_nodes

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.nnodes > 1,
    checks=CHECKS,
    part=join_nodes,
)
