"""A start with our worker: the drafter is found, and then SGLang asks us at three moments."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.draft.weights import check_draft_model
from sglang_dspark.engine import hooks
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.feature import Adjustment, LaunchContext, Stage, flag_of
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.launch import defaults
from sglang_dspark.engine.launch.checks import refuse
from sglang_dspark.engine.launch.flag_rules import broken
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM, installed_sglang
from sglang_dspark.errors import CheckpointError, ConfigError, EngineError
from sglang_dspark.hub import DRAFT_FILES, SUBFOLDER, drafter_in_target, local_folder

logger = logging.getLogger(__name__)

LENGTHS: Mapping[str, int] = {
    "speculative_dflash_block_size": 1,
    "speculative_num_draft_tokens": 1,
    "speculative_num_steps": 0,
}
"""Flags that say how long a block of another algorithm is, the first before the others, and how many tokens besides
drafts each counts."""


@dataclass(frozen=True)
class Launch(DSparkServer):
    """The start of one server. It is attached to SGLang's arguments, and found again in every process.

    Attributes:
        adjustments: flags that the start changes.
    """

    adjustments: tuple[Adjustment, ...] = ()

    @classmethod
    def find(cls, args: ServerArgs, config: DSparkConfig) -> Self:
        """Find the drafter. Nothing is written to ``args``, which SGLang has not resolved.

        Raises:
            ConfigError, CheckpointError: options that cannot work, or no usable drafter.
        """
        refuse(LaunchContext.of(args, config), Stage.OPTIONS)
        dummy = (args.speculative_draft_load_format or args.load_format) == "dummy"
        drafter = find_drafter(args, config, dummy=dummy)
        config, found = of_lengths(args, config, None if drafter is None else drafter.config.gamma)
        server = DSparkServer(config, drafter, dummy, defaults.draft_window(args))
        found = (*found, *of_rules(LaunchContext(arguments.looked_up(args), server)))
        return cls(config, drafter, dummy, server.draft_window, tuple(one.said for one in found), found)

    def resolve(self, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
        """Have SGLang resolve ``args``, which it asks our algorithm to check and to complete."""
        args.speculative_algorithm = ALGORITHM
        arguments.attach(args, self)
        for adjustment in self.adjustments:
            setattr(args, adjustment.name, adjustment.value)
            logger.warning("DSPARK: %s", adjustment.said)
        defaults.prepare(args)
        original(args)

    @classmethod
    def of(cls, args: ServerArgs) -> Self:
        """Return the launch that :meth:`resolve` has attached.

        Raises:
            EngineError: this SGLang resolves its arguments without our hook, which knows our options.
        """
        launch = arguments.attached(args)
        if not isinstance(launch, cls):
            raise EngineError(
                f"sglang {installed_sglang()} resolved its arguments and did not call ServerArgs.resolve_once, so "
                "options of DSPARK would be dropped; sglang-dspark cannot serve on this release as it is"
            )
        return launch

    def validate(self, args: ServerArgs) -> None:
        """Refuse what cannot be served, with all messages, before SGLang looks at the speculative options itself."""
        refuse(LaunchContext(args, self), Stage.MODELS, Stage.FLAGS)

    def after(self, args: ServerArgs) -> None:
        """Fill the fields that size SGLang's buffers, and install the hooks of the front end."""
        if self.draft_window is not None:
            args.speculative_draft_window_size = self.draft_window.size
            args.speculative_draft_sink_size = self.draft_window.sinks
        defaults.size_buffers(args, self.window)
        defaults.limit_requests(args, self.window)
        hooks.install(args, "routes", "front_end")
        # Gemma's wrapper would add one to positions that are read again for draft K/V.
        envs.SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION.set(True)
        _end_at_once()
        logger.info(
            "DSPARK: block size %d, policy %s, at most %d drafts verified per request, drafter %s",
            self.gamma,
            self.config.schedule,
            self.window - 1,
            self.draft_path or "none",
        )


def of_rules(context: LaunchContext) -> tuple[Adjustment, ...]:
    """Return the flags that rules of the core and of features adjust."""
    return tuple(rule.adjustment(context.args) for rule in broken(context, adjusts=True))


def of_lengths(args: ServerArgs, config: DSparkConfig, most: int | None) -> tuple[DSparkConfig, tuple[Adjustment, ...]]:
    """Return our options with the block that flags of other algorithms ask for, and these flags, dropped.

    Our own flag goes before them.

    Args:
        most: drafts of the drafter's block; None without a drafter.
    """
    given: dict[str, int] = {name: value for name in LENGTHS if (value := getattr(args, name)) is not None}
    if given.get("speculative_num_steps") == 1:  # says nothing: SGLang's own block drafters have no other value
        del given["speculative_num_steps"]
    if not given:
        return config, ()
    is_tree = (args.speculative_eagle_topk or 1) > 1
    drafts = [given[name] - LENGTHS[name] for name in given if not (is_tree and name == "speculative_num_draft_tokens")]
    if config.block_size is None and drafts:
        config = replace(config, block_size=max(1, min(drafts[0], most or drafts[0])))
    block = config.block_size or "the drafter's"
    return config, tuple(
        Adjustment(
            name,
            None,
            f"{flag_of(name)}={value} becomes {flag_name('block_size')}={block}: a block is a chain of drafts behind "
            "an anchor, at most as long as its drafter makes it",
        )
        for name, value in given.items()
    )


@hook(
    "sglang.srt.server_args.ServerArgs.resolved_dict",
    HookType.AFTER,
    where="front_end",
    reason="SGLang is not told of the drafter, which its description of a server names",
    by=Moment.SOME_TIME,
)
def tell_drafter(described: dict[str, object], args: ServerArgs) -> None:
    """Put the drafter's path into SGLang's description of a server, which logs and ``/server_info`` show."""
    server = arguments.attached(args)
    if isinstance(server, Launch):
        described["speculative_draft_model_path"] = server.draft_path or None


def find_drafter(args: ServerArgs, config: DSparkConfig, *, dummy: bool) -> ResolvedDrafter | None:
    """Return the drafter that ``args`` name, or that lies in the target's folder; None if none is to be served.

    Args:
        dummy: whether its weights will be random; their tensors are checked otherwise.

    Raises:
        ConfigError: no drafter was named, and the target has none; or the drafter cannot propose the tokens of a list.
        CheckpointError: there is no such checkpoint, a file is missing or damaged, or the tensors do not fit
            ``config.json``.
    """
    if config.draft_free:
        return None
    flag, cache_dir = "--speculative-draft-model-path", args.download_dir
    path = args.speculative_draft_model_path or drafter_in_target(
        args.model_path, revision=args.revision, cache_dir=cache_dir
    )
    if not path:
        raise ConfigError(
            f"DSPARK needs a drafter: pass {flag} with a drafter for your target, which has none in a folder "
            f"{SUBFOLDER} of its own, or {flag_name('draft_free')} to serve requests with presets alone"
        )
    revision = args.speculative_draft_model_revision
    folder = local_folder(path, flag=flag, files=DRAFT_FILES, revision=revision, cache_dir=cache_dir)
    drafter = ResolvedDrafter.read(folder)
    if not dummy:
        check_draft_model(folder, drafter.reading)
    if (listed := config.draft_vocabulary) is None:
        return drafter
    try:
        return drafter.proposing(listed)
    except CheckpointError as error:
        raise ConfigError(f"{flag_name('draft_vocabulary')}={listed}: {error}; drop the flag") from error


def _end_at_once() -> None:
    """Have a server that fails end in seconds, and its clients with it.

    SGLang would keep them waiting for a minute in which CUDA may write core dumps, though CUDA was not told to.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
