"""Weights that change while the server runs: the target's and the drafter's, by SGLang's routes and its engine."""

from sglang_dspark.engine.feature import Feature

DRAFTER = "draft"
"""The value of ``load_format`` that has ``/update_weights_from_disk`` load a drafter."""

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks={"any_worker": ("handlers",), "front_end": ("front_end",)},
    part="served.Weights",
    of_any_worker=True,
    routes="front_end.add_route",
)
