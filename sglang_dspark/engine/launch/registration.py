"""Makes DSPARK known to SGLang, by the name that it is to have there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_dspark import __version__
from sglang_dspark.engine import hooks
from sglang_dspark.engine.launch import defaults
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM

if TYPE_CHECKING:
    from sglang_dspark.engine.compat.decoder import Decoder

logger = logging.getLogger(__name__)


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
        # ModelRunner would otherwise read the draft's config by DFLASH rules (which know no tap -1).
        return self._drafter_attached

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def handle_server_args(self, server_args: ServerArgs) -> None:
        Launch.of(server_args).after(server_args)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, **wishes: object) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, **wishes)


def register_algorithm(load_worker: Callable[[], type[Decoder]]) -> None:
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
        validate_server_args=lambda args: Launch.of(args).validate(args),
        spec_class=DSparkAlgorithm,
    )(create_worker_class)
    for choice in defaults.CHOICES:
        register_resolution_hook(choice)(defaults.choose_as_plain)
    hooks.register_flags()
