"""By which names the plugin is asked for: SGLang's ``--speculative-algorithm``."""

from __future__ import annotations

COMMON_NAME = "DSPARK"
"""What everybody calls it, and SGLang its own DSPARK, too."""

ALGORITHM = "DSPARK_PLUGIN"
"""Under which we are registered."""
