"""Starts a server: has SGLang resolve its arguments for the worker that decodes, and makes DSPARK known to it.

SGLang asks our algorithm at two moments, :func:`validate` and :func:`complete`. `doctor` asks for the same start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs as Record
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_dspark import __version__
from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft.weights import ResolvedDrafter, check_draft_model
from sglang_dspark.engine import hooks
from sglang_dspark.engine.checks import refuse
from sglang_dspark.engine.feature import LaunchContext, Stage, flag_of
from sglang_dspark.engine.flags import (
    CHOOSING_STEPS,
    broken_rules,
    choose_as_plain,
    draft_window,
    limit_requests,
    prepare_arguments,
    size_buffers,
)
from sglang_dspark.engine.hooks import Hook, Moment, all_hooks, hook
from sglang_dspark.engine.server import (
    Adjustment,
    Attached,
    DSparkServer,
    OtherServer,
    TargetOnly,
    attach,
    attached,
    looked_up,
    restore,
    snapshot,
)
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM, COMMON_NAME, OTHER_RELEASE, installed_sglang
from sglang_dspark.errors import CheckpointError, ConfigError, EngineError, UnservedError
from sglang_dspark.hub import DRAFT_FILES, SUBFOLDER, drafter_in_target, local_folder

if TYPE_CHECKING:
    from sglang_dspark.engine.scheduler import StepDriver


logger = logging.getLogger(__name__)

LENGTHS: Mapping[str, int] = {
    "speculative_dflash_block_size": 1,
    "speculative_num_draft_tokens": 1,
    "speculative_num_steps": 0,
}
"""Flags that say how long a block of another algorithm is, the first before the others, and how many tokens besides
drafts each counts."""


def find_server(args: ServerArgs, config: DSparkConfig) -> DSparkServer:
    """Find the drafter of a server with our worker. Nothing is written to ``args``, which SGLang has not resolved.

    Raises:
        ConfigError, CheckpointError: options that cannot work, or no usable drafter.
    """
    refuse(LaunchContext.of(args, config), Stage.OPTIONS)
    dummy = (args.speculative_draft_load_format or args.load_format) == "dummy"
    drafter = find_drafter(args, config, dummy=dummy)
    config, found = block_size_from_flags(args, config, None if drafter is None else drafter.config.gamma)
    server = DSparkServer(config, drafter, dummy, draft_window(args), args.enable_deterministic_inference)
    context = LaunchContext(looked_up(args), server)
    by_rules = (rule.adjustment(context.args) for rule in broken_rules(context, adjusts=True))
    return replace(server, adjustments=(*found, *by_rules))


@dataclass(frozen=True)
class LeftToSGLang:
    """A start that leaves a target or a device to SGLang's own worker, with nothing of ours on its server.

    Attributes:
        why: our worker does not decode.
        refusal: what ours says of them.
        falls_back: whether the target decodes without speculation where SGLang refuses its worker, too.
    """

    why: str
    refusal: str
    falls_back: bool

    @property
    def reason(self) -> str:
        """Return whose worker decodes, and why."""
        return (
            f"SGLang's own worker decodes, unmodified: {self.why}. The routes below /dspark are missing; with "
            f"{flag_name('engine')} scheduled the plugin's policies decide how many drafts it verifies"
        )


def start(server: Attached | LeftToSGLang, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
    """Have SGLang resolve ``args`` for the worker that decodes, and attach the server to them for all processes.

    Raises:
        ValueError: SGLang refuses the worker that was asked for.
        UnservedError: it refuses the worker to which ours leaves the target.
    """
    if isinstance(server, DSparkServer):
        _start_ours(server, original, args)
    elif isinstance(server, TargetOnly):
        _start_target(server, original, args)
    elif isinstance(server, LeftToSGLang):
        _start_sglangs(server, original, args)
    else:
        _start_other(server, original, args)


def _start_ours(server: DSparkServer, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
    """Resolve for our worker: SGLang asks our algorithm to check and to complete ``args``."""
    args.speculative_algorithm = ALGORITHM
    attach(args, server)
    for adjustment in server.adjustments:
        setattr(args, adjustment.name, adjustment.value)
        logger.warning("DSPARK: %s", adjustment.said)
    prepare_arguments(args)
    hooks.install(args, "resolution")
    original(args)


def _start_target(server: TargetOnly, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
    """Resolve as if nothing had been asked of a drafter."""
    for field in record_fields(Record):
        if field.name.startswith("speculative_"):
            setattr(args, field.name, field.default)
    original(args)
    attach(args, server)
    hooks.install(args, "routes")
    logger.warning("DSPARK: effective decode path target-only, without speculation: %s", server.reason)


def _start_other(server: OtherServer, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
    """Resolve for another worker than ours, with our schedule."""
    args.speculative_algorithm = COMMON_NAME
    server.prepare(args)
    original(args)
    server = server.settled(args)
    attach(args, server)
    hooks.install(args, "routes", "front_end")
    logger.info("DSPARK: %s", server.reason)


def _start_sglangs(left: LeftToSGLang, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
    """Resolve as without the plugin. SGLang may still refuse its own worker, which only its resolution tells."""
    written = snapshot(args)
    try:
        original(args)
    except ValueError as error:
        reason = f"{left.refusal}\nSGLang's own worker does not serve it either: {error}"
        if not left.falls_back:
            raise UnservedError(reason) from error
        restore(args, written)
        _start_target(TargetOnly(reason), original, args)
    else:
        logger.info("DSPARK: %s", left.reason)


def started(args: ServerArgs) -> DSparkServer:
    """Return the server with our worker that :func:`start` has attached, while SGLang resolves ``args``.

    Raises:
        EngineError: this SGLang resolves its arguments without our hook, which knows our options.
    """
    server = attached(args)
    if not isinstance(server, DSparkServer):
        raise EngineError(
            f"sglang {installed_sglang()} resolved its arguments and did not call ServerArgs.resolve_once, so "
            f"options of DSPARK would be dropped; {OTHER_RELEASE}"
        )
    return server


def validate(args: ServerArgs) -> None:
    """Refuse what cannot be served, with all messages, before SGLang looks at the speculative options itself."""
    refuse(LaunchContext(args, started(args)), Stage.MODELS, Stage.FLAGS)


def complete(args: ServerArgs) -> None:
    """Fill the fields that size SGLang's buffers, and install the hooks of the front end."""
    server = started(args)
    if server.draft_window is not None:
        args.speculative_draft_window_size = server.draft_window.size
        args.speculative_draft_sink_size = server.draft_window.sinks
    size_buffers(args, server.window)
    limit_requests(args, server.window)
    hooks.install(args, "routes", "front_end")
    # Gemma's wrapper would add one to positions that are read again for draft K/V.
    envs.SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION.set(True)
    _end_at_once()
    logger.info(
        "DSPARK: block size %d, policy %s, at most %d drafts verified per request, drafter %s",
        server.gamma,
        server.config.schedule,
        server.window - 1,
        server.draft_path or "none",
    )


def block_size_from_flags(
    args: ServerArgs, config: DSparkConfig, most: int | None
) -> tuple[DSparkConfig, tuple[Adjustment, ...]]:
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
            f"{flag_of(name)}={value} becomes {flag_name('block_size')}={block}: DSPARK drafts a chain, at most as "
            "long as a block of the drafter",
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
    server = attached(args)
    if isinstance(server, DSparkServer):
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
            f"DSPARK needs a drafter, and the target's folder has none in its subfolder {SUBFOLDER}; pass {flag} with "
            f"a drafter of this target, or {flag_name('draft_free')} to serve without a drafter"
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


class DSparkAlgorithm(CustomSpecAlgo):
    """Answers what the scheduler asks of a speculative algorithm; the base class lacks the last three methods."""

    _drafter_attached = False

    def create_worker(self, server_args: ServerArgs) -> type:
        worker_class: type = super().create_worker(server_args)
        self._drafter_attached = True
        return worker_class

    def is_dflash_family(self) -> bool:
        # SGLang's DFLASH call sites are the ones we need: K/V reservation by our own draft input, pool sizing with
        # draft layers, graphs for verification. Until the worker exists the answer is no, because the target's
        # ModelRunner would otherwise read the draft's config with DFLASH rules (which know no tap -1).
        return self._drafter_attached

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def handle_server_args(self, server_args: ServerArgs) -> None:
        complete(server_args)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, **kwargs)


def register_algorithm(load_worker: Callable[[], type[StepDriver]]) -> None:
    """Register the algorithm and its flags, once per process. A server that does not ask for it is unchanged.

    Args:
        load_worker: imports the class of the worker; called in scheduler processes only.
    """
    if get_spec(ALGORITHM) is not None:
        return

    def create_worker_class(server_args: ServerArgs) -> type:
        # Called by the scheduler after the target is loaded and before any memory pool exists.
        hooks.install(server_args, "any_worker", "scheduler", resolving_view(server_args).device)
        logger.info("sglang-dspark %s drives this scheduler", __version__)
        return load_worker()

    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=validate,
        spec_class=DSparkAlgorithm,
    )(create_worker_class)
    for choice in CHOOSING_STEPS:
        register_resolution_hook(choice)(choose_as_plain)
    hooks.register_flags()


def plugin_filter() -> str | None:
    """Return SGLang's comma-separated list of the plugins that it may load; None means all."""
    return envs.SGLANG_PLUGINS.get() or None


def known_hooks() -> Iterator[tuple[Hook, str | None]]:
    """Yield every hook, and what is wrong with the function that it patches; None if it is there."""
    for patch in all_hooks():
        try:
            patch.load_target()
        except (ImportError, AttributeError) as error:
            yield patch, str(error)
        else:
            yield patch, None
