"""Targets that read pictures: rows of a verification stand behind those of their own request."""

from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.flag_rule import FlagRule
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.sglang_types import ServerArgs

_ENCODED_HERE = "drop the flag: pictures are encoded by the server itself"


def _reads_pictures(args: ServerArgs) -> bool:
    target = model_config_of(args)
    return bool(target.is_multimodal or target.model_is_mrope)


FEATURE = Feature(
    __name__,
    is_used=_reads_pictures,
    hooks=(
        Hook(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
            HookType.REPLACE,
            "features.pictures.positions.place_rows",
            "scheduler",
            "if positions have three coordinates, SGLang assumes that a step verifies as many rows for every request",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.mm_utils.prepare_mm_inputs",
            HookType.AFTER,
            "features.pictures.positions.keep_embeddings",
            "scheduler",
            "the embeddings of prompts with pictures, which a drafter may read, are memory that the target's layers "
            "add to",
            Moment.SOME_TIME,
        ),
    ),
    flag_rules=(
        FlagRule("language_only", (False,), _ENCODED_HERE),
        FlagRule("encoder_only", (False,), _ENCODED_HERE),
    ),
    part="positions.Positions.of",
)
