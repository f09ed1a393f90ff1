"""Patches of SGLang: each is declared on our function, and installed in the processes that need it.

SGLang applies hooks through its ``HookRegistry``, which logs a failed patch and goes on; :func:`install` raises
instead. The core's hooks that say ``flags`` are there before DSPARK is selected; all others are installed only when it
was, and those of a feature only if the server uses it.

A release of SGLang may also keep a function and call another one instead. A hook on such a function is applied and does
nothing, without a word. So every hook says by which moment it must have been called, and is looked for then.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from typing import TypeVar, get_args

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_dspark.config import option_text
from sglang_dspark.engine.feature import Where, all_features
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import OTHER_RELEASE, installed_sglang
from sglang_dspark.errors import EngineError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

CORE = "sglang_dspark.engine"
CORE_HOOKS: Mapping[Where, tuple[str, ...]] = {
    "flags": ("decision",),
    "front_end": ("start", "requests"),
    "routes": ("http",),
    "any_worker": ("draft_input", "scheduler"),
    "scheduler": ("draft_input", "target", "scheduler", "graphs"),
    "cuda": ("graphs",),
    "cpu": ("scheduler",),
}
"""The core's modules with hooks, by the place of these."""

_OURS = HookSource("dspark", "sglang-dspark")
"""What SGLang's log says of our hooks; most are registered when its plugins have been loaded."""

_installed: set[str] = set()
"""Names. Hooks on one target are installed together: SGLang patches it once, with the first of them innermost."""


class Moment(Enum):
    """The moment by which a hook has been called if it is called at all."""

    READY = "when the scheduler was ready"
    ANSWERED = "when the first request had been answered"
    SOME_TIME = "never for certain"


@dataclass(frozen=True)
class Hook:
    """One patch of one SGLang function.

    Attributes:
        target: the function of SGLang, as one would import it.
        kind: how the handler stands to it.
        handler: our function.
        where: the process.
        reason: why SGLang has to be patched there.
        by: the moment by which SGLang must have called it.
    """

    target: str
    kind: HookType
    handler: Callable[..., object]
    where: Where
    reason: str
    by: Moment

    @property
    def name(self) -> str:
        """Return what messages and logs call it: our function, and that of SGLang."""
        place = f"{self.handler.__module__}.{self.handler.__qualname__}".removeprefix("sglang_dspark.")
        return f"{place} on {self.target.rpartition('.')[2]}"

    def load_target(self) -> Callable[..., object]:
        """Import and return the function that is patched."""
        return resolve_name(self.target)


_declared: defaultdict[str, list[Hook]] = defaultdict(list)
"""By the module of the handler."""


def hook(target: str, kind: HookType, *, where: Where, reason: str, by: Moment = Moment.ANSWERED) -> Callable[[F], F]:
    """Return a decorator that declares our function a hook, and returns it as it is. Arguments: see :class:`Hook`.

    A module of the core has to be named in :data:`CORE_HOOKS` for the same place; those of features are all imported.
    """

    def declare(handler: F) -> F:
        _declared[handler.__module__].append(Hook(target, kind, handler, where, reason, by))
        return handler

    return declare


def _hooks_of_core(*places: Where) -> Iterator[Hook]:
    for place in places:
        for module in CORE_HOOKS.get(place, ()):
            import_module(f"{CORE}.{module}")
            yield from (hook for hook in _declared[f"{CORE}.{module}"] if hook.where == place)


def register_flags() -> None:
    """Hand SGLang the hooks that are there before DSPARK is selected; it applies them when its plugins are loaded.

    Features are not imported: a process without DSPARK has nothing of them.
    """
    found = list(_hooks_of_core("flags"))
    if option_text("simulate_acceptance", {}) is not None:
        found += _hooks(None, "simulated")
    for hook in found:
        HookRegistry.register(hook.target, hook.handler, hook.kind)


def all_hooks() -> tuple[Hook, ...]:
    """Import all modules with hooks, and return these: of the core, and of all features."""
    return tuple(_hooks(None, *get_args(Where)))


def _hooks(args: ServerArgs | None, *places: Where) -> Iterator[Hook]:
    """Yield the hooks of these places, of the features that a server with these arguments uses; without any, of all."""
    yield from _hooks_of_core(*places)
    for feature in all_features():
        if args is not None and not feature.is_used(args):
            continue
        package = import_module(feature.package)
        below = iter_modules(getattr(package, "__path__", ()), f"{feature.package}.")
        for name in (feature.package, *(module.name for module in below)):
            import_module(name)
            yield from (hook for hook in _declared[name] if hook.where in places)


def install(args: ServerArgs, *places: Where) -> None:
    """Apply the hooks of these places; those in force stay. In a scheduler, call it before any memory pool exists.

    Args:
        args: of the server, which say which features it uses.

    Raises:
        EngineError: another plugin has patched a target, or a patch did not take effect.
    """
    wanted = [hook for hook in _hooks(args, *places) if hook.name not in _installed]
    for hook in wanted:
        if hook.target in HookRegistry._patched:
            # SGLang patches a target once: ours would be dropped without a word.
            raise EngineError(
                f"hook {hook.name} finds {hook.target} patched by another plugin; keep that plugin out with "
                "SGLANG_PLUGINS=dspark"
            )
        handler = expect_called(hook.name, hook.target, hook.by, hook.handler)
        HookRegistry.register(hook.target, handler, hook.kind, source=_OURS)
    _apply()
    release = installed_sglang()
    for hook in wanted:
        _installed.add(hook.name)
        if hook.target not in HookRegistry._patched:
            raise EngineError(
                f"hook {hook.name} did not take effect on {hook.target} ({hook.reason}); this is not an unmodified "
                f"sglang {release}: pip install --force-reinstall sglang=={release}"
            )
        logger.debug("hook %s: %s", hook.name, hook.reason)


def _apply() -> None:
    """Have SGLang apply what is registered, but look for none but functions among the names of all modules.

    It looks for methods, too, which no module has by name: 40 ms for each hook, among 8,000 modules.
    """
    find_all = getattr(hook_registry, "_propagate_patch", None)
    if find_all is None:  # another release of SGLang
        HookRegistry.apply_hooks()
        return

    def find(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else find_all(original, wrapped, owner)

    hook_registry._propagate_patch = find
    try:
        HookRegistry.apply_hooks()
    finally:
        hook_registry._propagate_patch = find_all


# By process: a forked one inherits what its parent expects.
_expected: defaultdict[tuple[int, Moment], dict[str, str]] = defaultdict(dict)


def expect_called(name: str, target: str, moment: Moment, function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function``, a hook on ``target``, wrapped so that its first call is noted."""
    expected = _expected[os.getpid(), moment]
    expected[name] = target

    @functools.wraps(function)
    def noting(*args: object, **kwargs: object) -> T:
        expected.pop(name, None)
        return function(*args, **kwargs)

    return noting


def check_called(moment: Moment) -> None:
    """Refuse to go on if a hook that must have been called by ``moment`` has not been.

    Raises:
        EngineError: names the hook.
    """
    for name, target in _expected[os.getpid(), moment].items():
        raise EngineError(
            f"sglang {installed_sglang()} had not called {target} {moment.value}, so the hook {name} has no effect; "
            f"{OTHER_RELEASE}"
        )
