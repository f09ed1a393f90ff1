"""Targets that read pictures: rows of a verification stand behind those of their own request."""

from sglang.srt.arg_groups.overrides import model_config_of

from sglang_dspark.engine.feature import Feature, FlagRule
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.features.pictures.positions import Positions

_ENCODED_HERE = "drop the flag: pictures are encoded by the server itself"


def _reads_pictures(args: ServerArgs) -> bool:
    target = model_config_of(args)
    return bool(target.is_multimodal or target.model_is_mrope)


FEATURE = Feature(
    __name__,
    is_used=_reads_pictures,
    flag_rules=(
        FlagRule("language_only", (False,), _ENCODED_HERE),
        FlagRule("encoder_only", (False,), _ENCODED_HERE),
    ),
    part=Positions.of,
)
