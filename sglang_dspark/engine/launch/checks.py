"""Lists everything that a start of the core can be refused for; servers and `doctor` run it with the features' checks.

Also, `launch.py` refuses a drafter that cannot be read, and `config.py` options that contradict each other.
"""

from sglang_dspark.engine.feature import Check, LaunchContext, Stage, all_features
from sglang_dspark.engine.launch import flag_checks, model_checks
from sglang_dspark.errors import ConfigError, UnservedError


def refuse(context: LaunchContext, *stages: Stage) -> None:
    """Make all checks of these stages, and raise the messages of those that fail, one a line.

    The error is an :class:`UnservedError` if one says that DSPARK does not serve the device, the target or the pair.
    """
    if failed := failures(context, *stages):
        kind = UnservedError if any(failed.values()) else ConfigError
        raise kind("\n".join(failed))


def failures(context: LaunchContext, *stages: Stage) -> dict[str, bool]:
    """Return the messages of the checks of these stages that fail; True if DSPARK does not serve what is there."""
    failed: dict[str, bool] = {}
    for check in all_checks():
        if check.stage in stages and (message := check.message(context)):
            # A check that needs what another one has refused says the same.
            failed.setdefault(message, check.unserved)
    return failed


def all_checks() -> tuple[Check, ...]:
    """Return the checks of the core and those of all features."""
    return (*CHECKS, *(check for feature in all_features() for check in feature.load_checks()))


CHECKS: tuple[Check, ...] = (
    Check("drafter beside draft-free", Stage.OPTIONS, flag_checks.drafter_beside_draft_free),
    Check("window of the drafter", Stage.OPTIONS, flag_checks.draft_window),
    Check("form of draft weights", Stage.OPTIONS, flag_checks.draft_load_format),
    Check("application of tokenizer workers", Stage.OPTIONS, flag_checks.application),
    Check("device", Stage.MODELS, model_checks.device, unserved=True),
    Check("target family", Stage.MODELS, model_checks.family, unserved=True),
    Check("dimensions of the pair", Stage.MODELS, model_checks.dimensions, unserved=True),
    Check("layers read from the target", Stage.MODELS, model_checks.own_layers, unserved=True),
    Check("storage of the drafter", Stage.MODELS, model_checks.draft_storage),
    Check("block size", Stage.MODELS, model_checks.block_size),
    Check("context of the target's RoPE", Stage.MODELS, model_checks.rope, unserved=True),
    Check("rows of attention", Stage.MODELS, model_checks.attention_rows),
    Check("simulated acceptance", Stage.FLAGS, flag_checks.simulated_acceptance),
    Check("confidence head", Stage.FLAGS, flag_checks.confidence_head),
    Check("temperatures", Stage.FLAGS, flag_checks.temperatures),
    Check("dtype of K/V", Stage.FLAGS, flag_checks.kv_dtype),
    Check("flags of SGLang", Stage.FLAGS, flag_checks.flags),
    Check("variables of SGLang", Stage.FLAGS, flag_checks.variables),
    Check("attention of prompts", Stage.FLAGS, flag_checks.prefill_attention),
)
