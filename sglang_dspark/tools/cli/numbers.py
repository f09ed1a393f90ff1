"""Options that are lists of numbers."""

from typing import Annotated, Any, get_args, get_origin

import click

from sglang_dspark.declared import validate


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click, not in others
    """A tuple of numbers such as ``1,2,3``.

    Args:
        kind: annotation that each number is checked by.
        distinct: no number may come twice.
    """

    name = "numbers"

    def __init__(self, kind: Any, *, distinct: bool = False) -> None:
        self._kind, self._distinct = kind, distinct

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        bare = get_args(self._kind)[0] if get_origin(self._kind) is Annotated else self._kind
        try:
            numbers = tuple(bare(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,3", param, ctx)
        if self._distinct and len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} has a number twice", param, ctx)
        try:
            return tuple(validate(number, self._kind) for number in numbers)
        except ValueError as error:
            self.fail(f"each number of {value!r} {error}", param, ctx)
