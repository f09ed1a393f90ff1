"""A check of servers with several tokenizer workers."""

from sglang.srt.environ import envs

from sglang_dspark.engine.api.http import APP_OF_WORKERS
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.flag_rule import flag_of


def application(context: LaunchContext) -> str | None:
    """Refuse keys that no worker asks for, and another application in place of ours, which checks requests there."""
    args, variable = context.args, envs.SGLANG_HTTP_SERVER_APP_PATH
    if args.tokenizer_worker_num == 1:
        return None
    beside = f"cannot be combined with --tokenizer-worker-num={args.tokenizer_worker_num}"
    if given := [flag_of(name) for name in ("api_key", "admin_api_key") if getattr(args, name)]:
        return (
            f"{' and '.join(given)} {beside}: SGLang asks for keys in a single worker only; drop one of the flags, and "
            "have a proxy ask for keys"
        )
    if variable.get() not in (variable.default, APP_OF_WORKERS):
        return f"{variable.name}={variable.get()} in the environment {beside}, whose application is DSPARK's; unset it"
    return None
