"""Finds definitions in the sources of packages by their dotted paths, and describes their forms.

Nothing is imported: the sources may be of a release whose dependencies are not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from inspect import Parameter, Signature
from pathlib import Path
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Found(NamedTuple):
    """A definition, and the module in which it stands."""

    module: str
    node: ast.AST


class Sources:
    """Definitions in packages, looked up as Python would find them on import.

    Args:
        folder: holds the packages' folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looking: set[str] = set()
        self.module = cache(self._module)
        self.find = cache(self._find)

    def form(self, path: str) -> str | None:
        """Return the form of what a path names; None if there is nothing.

        That is the signature of a function, without annotations and with ``...`` for defaults, or else its kind. A
        class with fields has an ``__init__``, too.
        """
        found = self.find(path)
        if found is None:
            return self._fields(path.removesuffix(".__init__")) if path.endswith(".__init__") else None
        if isinstance(found.node, ast.Module | ast.ClassDef):
            return "module" if isinstance(found.node, ast.Module) else "class"
        if not isinstance(found.node, _FUNCTIONS):
            return "value"
        if any(ast.unparse(each).endswith("property") for each in found.node.decorator_list):
            return "value"
        return f"{'async ' * isinstance(found.node, ast.AsyncFunctionDef)}{written(signature(found.node.args))}"

    def ancestors(self, found: Found) -> Iterator[Found]:
        """Yield a class, then those that it inherits from as far as their sources are there."""
        if isinstance(found.node, ast.ClassDef):
            yield found
            for base in found.node.bases:
                name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
                if (inherited := self.find(f"{found.module}.{name}")) is not None:
                    yield from self.ancestors(inherited)

    def _module(self, name: str) -> ast.Module | None:
        path = self._folder.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.parent / f"{path.name}.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"), str(file))
        return None

    def _find(self, path: str) -> Found | None:
        """Return what a path like ``package.module.Class.member`` names, imported or inherited as it may be."""
        if (module := self.module(path)) is not None:
            return Found(path, module)
        owner, _, name = path.rpartition(".")
        found = self.find(owner) if owner else None
        if found is None:
            return None
        if not isinstance(found.node, ast.Module):
            return self._member(found, name)
        if path in self._looking:  # modules that import each other whole
            return None
        self._looking.add(path)
        try:
            return self._in_module(found, name)
        finally:
            self._looking.remove(path)

    def _in_module(self, found: Found, name: str) -> Found | None:
        own = _defined(found.node.body)  # type: ignore[attr-defined]
        if name in own:
            return self._imported(Found(found.module, own[name]), name)
        starred = (self._imported(Found(found.module, own[each]), name) for each in own if each.startswith("*"))
        return next((one for one in starred if one), None)

    def _imported(self, found: Found, name: str) -> Found | None:
        """Return what a name of a module means: where it is imported, what is there."""
        if isinstance(found.node, ast.ImportFrom):
            is_package = self.module(f"{found.module}.__init__") is not None
            package = found.module if is_package else found.module.rpartition(".")[0]
            source = resolve_name("." * found.node.level + (found.node.module or ""), package)
            original = next((alias.name for alias in found.node.names if alias.asname == name), name)
            return self.find(f"{source}.{original}")
        if isinstance(found.node, ast.Import):
            return self.find(next((alias.name for alias in found.node.names if alias.asname == name), name))
        return found

    def _member(self, found: Found, name: str) -> Found | None:
        """Return a member of a class, or of what a module makes of a class: methods, fields, ``self.name = ...``."""
        if isinstance(found.node, ast.Assign | ast.AnnAssign):
            made = found.node.value
            kind = self.find(f"{found.module}.{ast.unparse(made.func)}") if isinstance(made, ast.Call) else None
            return found if kind is None else self._member(kind, name)  # what others make may have any member
        chain = [(each, each.node) for each in self.ancestors(found) if isinstance(each.node, ast.ClassDef)]
        for each, node in chain:
            if (own := _defined(node.body).get(name)) is not None:
                return Found(each.module, own)
        for each, node in chain:
            if name in _set_on_self(node):
                return Found(each.module, ast.Constant(name))
        return None

    def _fields(self, path: str) -> str | None:
        """Return the signature of ``__init__`` that a class has by its fields; those with defaults are ``**fields``."""
        found = self.find(path)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        required = dict.fromkeys(["self"])
        for each in reversed([*self.ancestors(found)]):
            for name, node in _defined(each.node.body).items():  # type: ignore[attr-defined]
                if (
                    isinstance(node, ast.AnnAssign)
                    and node.value is None
                    and "ClassVar" not in ast.unparse(node.annotation)
                ):
                    required[name] = None
        return f"({', '.join(required)}, **fields)"


def _defined(body: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Return statements by the names that they define: a definition before an import, else the first."""
    defined: dict[str, ast.AST] = {}
    others: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            defined.setdefault(node.name, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        others.setdefault(each.id, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                star = f"*{getattr(node, 'module', '')}"
                others.setdefault(star if alias.name == "*" else alias.asname or alias.name.partition(".")[0], node)
        else:
            inner = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler))
            others = _defined(inner) | others
    return others | defined


@cache
def _set_on_self(node: ast.ClassDef) -> frozenset[str]:
    """Return the attributes that methods of a class set on ``self``."""
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return frozenset(each.attr for each in stored if ast.unparse(each.value) == "self")


def signature(given: ast.arguments) -> Signature:
    """Return the names and kinds of parameters, and which have defaults."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [Parameter.empty] * (len(positional) - len(given.defaults)) + [...] * len(given.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(given.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(given.args)
    parameters = [
        Parameter(each.arg, kind, default=default)
        for each, kind, default in zip(positional, kinds, defaults, strict=True)
    ]
    if given.vararg:
        parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(
            Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if value is None else ...)
        )
    if given.kwarg:
        parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def written(given: Signature) -> str:
    """Return a signature as Python would have it in a stub."""
    return str(given).replace("Ellipsis", "...")


def parsed(form: str) -> Signature | None:
    """Return the signature that :func:`written` has written, perhaps after ``async``; None of other forms."""
    if not form.endswith(")"):
        return None
    [function] = ast.parse(f"{form.replace('(', 'def f(', 1)}: ...").body
    return signature(function.args)  # type: ignore[attr-defined]
