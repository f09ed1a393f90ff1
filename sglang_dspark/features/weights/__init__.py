"""Weights that change while the server runs: the target's and the drafter's, by SGLang's routes and its engine."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.weights.front_end import add_route
from sglang_dspark.features.weights.served import Weights

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    part=Weights,
    of_any_worker=True,
    routes=add_route,
)
