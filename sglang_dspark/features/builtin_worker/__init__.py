"""SGLang's own worker under our schedule, which decides what is verified, and whether anything is drafted.

``server.py`` is its start, ``driver.py`` decides and learns, ``step.py`` is one step. By ``common_draws.py`` the worker
as it comes accepts what ours accepts in simulations.
"""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import speculating
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.features.builtin_worker.server import ScheduledServer


def _decodes(args: ServerArgs) -> bool:
    server = speculating(args)
    return server is not None and server.engine == "scheduled"


FEATURE = Feature(
    __name__,
    is_used=_decodes,
    other_server=ScheduledServer,
)
