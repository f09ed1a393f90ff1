"""Live vocabulary: the list of tokens that a drafter proposes follows what answers consist of."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ServerArgs


def has_list(args: ServerArgs) -> bool:
    """Return whether the operator has named a list."""
    server = attached(args)
    if not isinstance(server, DSparkServer) or server.drafter is None:
        return False
    return server.config.draft_vocabulary is not None


FEATURE = Feature(__name__, is_used=has_list, part="served.LiveVocabulary")
