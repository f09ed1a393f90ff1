"""Starts with the target alone, and with SGLang's own worker as it comes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import flag_name
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import hooks
from sglang_dspark.engine.launch_state import TargetOnly
from sglang_dspark.engine.sglang_types import ServerArgs
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
class LeftToSGLang:
    """A start that leaves a target or a device to SGLang's own worker, and nothing of ours on its server.

    Attributes:
        why: our worker does not decode.
        refusal: what ours says of them.
        falls_back: whether the target decodes alone where SGLang refuses its worker, too.
    """

    why: str
    refusal: str
    falls_back: bool

    @property
    def reason(self) -> str:
        """Return whose worker decodes, and why."""
        return (
            f"SGLang's own worker decodes as it comes: the plugin's does not serve {self.why}. It has no routes of "
            f"DSPARK; {flag_name('engine')} scheduled has our policies decide what it verifies"
        )

    def resolve(self, original: Callable[[ServerArgs], None], args: ServerArgs) -> None:
        """Have SGLang resolve the arguments as without the plugin.

        Raises:
            UnservedError: it refuses them.
        """
        written = arguments.snapshot(args)
        try:
            original(args)
        except ValueError as error:
            reason = f"{self.refusal}\nSGLang's own worker does not serve it either: {error}"
            if not self.falls_back:
                raise UnservedError(reason) from error
            arguments.restore(args, written)
            TargetAlone(reason).resolve(original, args)
        else:
            logger.info("DSPARK: %s", self.reason)
