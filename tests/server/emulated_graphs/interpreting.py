"""Triton's interpreter with less work per call.

For the time of a launch it replaces the operations of ``triton.language`` by its own. It does so again for every
function that a kernel calls, where nothing is left to replace; that takes half of a launch's time.
"""

import triton.language as tl
from triton.runtime import interpreter


class _Launch:
    """Replacements of one launch; ``restore`` is called at its end."""

    def __init__(self, scope, known):
        self._scope, self._known = scope, known

    def restore(self):
        self._known.clear()
        self._scope.restore()


class _Nothing:
    def restore(self):
        pass


def patch_once_per_launch(patch=interpreter._patch_lang):
    """Make the interpreter replace what functions of one launch see once, from now on."""
    known = set()  # the modules of operations that functions of the launch under way have seen

    def patch_lang(function):
        seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen in known:
            return _Nothing()
        launched = not known  # functions of a device are called inside of launches only
        scope = patch(function)
        known.add(seen)
        return _Launch(scope, known) if launched else _Nothing()

    interpreter._patch_lang = patch_lang
