"""SLOs: a request may name a time per token and a weight, and gets more of the drafts when it is late."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.slo.keys import SloKeys
from sglang_dspark.features.slo.served import Slos

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    request_keys=SloKeys,
    part=Slos.of,
)
