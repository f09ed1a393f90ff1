"""Lists everything that a start of the core can be refused for; servers and `doctor` run it with the features' checks.

Also, `launch.py` refuses a drafter that cannot be read, and `config.py` options that contradict each other.
"""

from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.launch import flag_checks, model_checks
from sglang_dspark.engine.launch.check import Check, Moment
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.errors import ConfigError, UnservedError


def refuse(context: LaunchContext, *moments: Moment) -> None:
    """Make all checks of these moments, and raise the messages of those that fail, one a line.

    The error is an :class:`UnservedError` if one says that DSPARK does not serve the device, the target or the pair.
    """
    if failed := failures(context, *moments):
        kind = UnservedError if any(failed.values()) else ConfigError
        raise kind("\n".join(failed))


def failures(context: LaunchContext, *moments: Moment) -> dict[str, bool]:
    """Return the messages of the checks of these moments that fail; True if DSPARK does not serve what is there."""
    failed: dict[str, bool] = {}
    for check in all_checks():
        if check.moment in moments and (message := check.message(context)):
            # A check that needs what another one has refused says the same.
            failed.setdefault(message, check.unserved)
    return failed


def all_checks() -> tuple[Check, ...]:
    """Return the checks of the core and those of all features."""
    return (*CHECKS, *(check for feature in all_features() for check in feature.load_checks()))


CHECKS: tuple[Check, ...] = (
    Check("drafter beside draft-free", Moment.OPTIONS, flag_checks.drafter_beside_draft_free),
    Check("window of the drafter", Moment.OPTIONS, flag_checks.draft_window),
    Check("form of draft weights", Moment.OPTIONS, flag_checks.draft_load_format),
    Check("kernels of experts", Moment.OPTIONS, flag_checks.expert_kernels),
    Check("device", Moment.MODELS, model_checks.device, unserved=True),
    Check("target family", Moment.MODELS, model_checks.family, unserved=True),
    Check("dimensions of the pair", Moment.MODELS, model_checks.dimensions, unserved=True),
    Check("block size", Moment.MODELS, model_checks.block_size),
    Check("context of the target's RoPE", Moment.MODELS, model_checks.rope, unserved=True),
    Check("rows of attention", Moment.MODELS, model_checks.attention_rows),
    Check("number of draft tokens", Moment.FLAGS, flag_checks.draft_tokens),
    Check("simulated acceptance", Moment.FLAGS, flag_checks.simulated_acceptance),
    Check("confidence head", Moment.FLAGS, flag_checks.confidence_head),
    Check("temperatures", Moment.FLAGS, flag_checks.temperatures),
    Check("dtype of K/V", Moment.FLAGS, flag_checks.kv_dtype),
    Check("flags of SGLang", Moment.FLAGS, flag_checks.flags),
    Check("pages", Moment.FLAGS, flag_checks.pages),
    Check("server in Rust", Moment.FLAGS, flag_checks.rust_server),
    Check("size of the K/V pool", Moment.FLAGS, flag_checks.kv_sizing),
    Check("attention of prompts", Moment.FLAGS, flag_checks.prefill_attention),
    Check("attention of decoding", Moment.FLAGS, flag_checks.decode_attention),
    Check("graphs of prefills", Moment.FLAGS, flag_checks.prefill_graphs),
)
