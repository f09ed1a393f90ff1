"""Describe a flag of SGLang that is served with some values only."""

from dataclasses import dataclass

from sglang_dspark.engine.sglang_types import ServerArgs


@dataclass(frozen=True)
class FlagRule:
    """A flag that DSPARK serves with some values only.

    Attributes:
        name: the field of ``ServerArgs``.
        allowed: values that are served, the default among them.
        remedy: what to do instead.
        follows: the field whose value SGLang takes over if this flag is not given; that value is served, too.
    """

    name: str
    allowed: tuple[object, ...]
    remedy: str = "drop the flag"
    follows: str = ""

    def refuses(self, args: ServerArgs) -> bool:
        """Return whether ``args`` have another value."""
        value = getattr(args, self.name)
        return value not in self.allowed and not (self.follows and value == getattr(args, self.follows))


def flag_of(name: str) -> str:
    """Return the flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")
