"""Refuse what recurrent layers are not served with."""

from sglang.srt.utils import cpu_has_amx_support

from sglang_dspark.engine.feature import Check, LaunchContext, Stage


def packed_layers(context: LaunchContext) -> str | None:
    """Refuse such targets on a CPU whose kernels keep the layers before the recurrent ones in another layout."""
    family, found = context.family, context.args.device
    if not family.recurrent or found != "cpu" or not cpu_has_amx_support():
        return None
    return (
        f"--model-path: target architecture {family.architecture} is not served with DSPARK on {found}: its layers "
        "keep recurrent states, and SGLang's kernels for this CPU pack the convolutions before them for AMX; install "
        "the published sglang-kernel in their place, and run sglang-dspark enable-cpu"
    )


def snapshots(context: LaunchContext) -> str | None:
    """Refuse snapshots of states that follow each other too closely."""
    args, least = context.args, 2 * context.server.window
    if not context.family.recurrent or args.mamba_radix_cache_strategy != "extra_buffer":
        return None
    # Under overlap two steps may pass before SGLang takes the state that the first of them has left.
    if args.mamba_track_interval >= least:
        return None
    return (
        f"DSPARK cannot run with --mamba-track-interval={args.mamba_track_interval} beside a target with recurrent "
        f"layers; pass {least} or more"
    )


CHECKS = (
    Check("recurrent layers", Stage.MODELS, packed_layers, unserved=True),
    Check("snapshots of states", Stage.FLAGS, snapshots),
)
