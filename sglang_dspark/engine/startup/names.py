"""By which name the plugin is asked for: SGLang's ``--speculative-algorithm``."""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

COMMON_NAME = "DSPARK"
"""What everybody calls it."""

ALGORITHM = "DSPARK_PLUGIN" if COMMON_NAME in SpeculativeAlgorithm.__members__ else COMMON_NAME
"""Under which we are registered: SGLang keeps the name for its own DSPARK where it has one."""
