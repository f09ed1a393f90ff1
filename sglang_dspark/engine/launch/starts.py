"""Starts with another worker than ours, and with none."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine import hooks
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch_state import OtherServer, TargetOnly
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import COMMON_NAME
from sglang_dspark.errors import UnservedError

logger = logging.getLogger(__name__)


class TargetAlone(TargetOnly):
    """The start of a plain server, which says in our routes why it is one."""

    def resolve(self, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
        """Have SGLang resolve the arguments as if nothing had been asked of a drafter."""
        for field in record_fields(Record):
            if field.name.startswith("speculative_"):
                setattr(args, field.name, field.default)
        original(args)
        arguments.attach(args, self)
        hooks.install(args, "routes")
        logger.warning("DSPARK: effective decode path target-only, without speculation: %s", self.reason)


@dataclass(frozen=True)
class OtherStart:
    """A start with another worker than ours. SGLang may still refuse it, which only its resolution tells.

    Attributes:
        server: kind of the server.
        config: our options.
        because: why its worker decodes.
        refusal: why ours does not; empty if the other one was asked for.
    """

    server: type[OtherServer]
    config: DSparkConfig
    because: str
    refusal: str = ""

    def resolve(self, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
        """Have SGLang resolve the arguments for its worker.

        Raises:
            ValueError: SGLang refuses the worker that was asked for.
            UnservedError: it refuses the worker to which ours leaves the target.
        """
        written = arguments.snapshot(args)
        args.speculative_algorithm = COMMON_NAME
        try:
            server = self.server.before(args, self.config, self.because)
            original(args)
            server = server.settled(args)
        except ValueError as error:
            if not self.refusal:
                raise
            reason = f"{self.refusal}\nSGLang's own worker does not serve it either: {error}"
            if self.config.fallback != "target-only":
                raise UnservedError(reason) from error
            arguments.restore(args, written)
            TargetAlone(reason).resolve(original, args)
            return
        arguments.attach(args, server)
        hooks.install(args, "routes", "front_end")
        logger.info("DSPARK: %s", server.reason)
