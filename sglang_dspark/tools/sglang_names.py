"""Lists the names of SGLang that the plugin uses, and what a release of SGLang changes about them.

``sglang_names.json`` has the form of each name in the release that is served. ``python -m
sglang_dspark.tools.sglang_names`` writes it from the installed one. Everything is read from sources.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_dspark.engine import support
from sglang_dspark.errors import EngineError
from sglang_dspark.files import atomic_write_text
from sglang_dspark.tools.sglang_sources import Found, Sources, parsed, signature

PACKAGE = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")

Kind = Literal["hook", "override", "call", "import", "annotation", "field", "flag"]
"""How our code uses a name: what only annotates it does not import when it runs."""

_PROTOCOLS = "sglang_dspark.engine.sglang_types"
"""The module that lists the fields of SGLang's objects."""

_HANDED_FIRST = {"AFTER": 1, "AROUND": 1}
"""Arguments of a handler before those of its target, by the kind of the hook."""

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_TABLES = (
    _SERVER_ARGS,
    "sglang.srt.managers.io_struct.GenerateReqInput",
    "sglang.srt.sampling.sampling_params.SamplingParams",
)
"""Classes whose fields our tables name in words: flags, fields of requests, and sampling parameters."""


class Call(NamedTuple):
    """How our code calls a function: with so many positional arguments, and these keywords."""

    num_positional: int
    keywords: tuple[str, ...]


class Use(NamedTuple):
    """A place of our code that uses a name of SGLang.

    Attributes:
        given: the call, or the signature of our function that takes the place of SGLang's.
    """

    name: str
    kind: Kind
    place: str
    given: Call | Signature | None = None


class Drift(NamedTuple):
    """A name whose form in another release differs.

    Attributes:
        form: in that release; None if the name is gone.
        places: of our code, those that it breaks first.
        breaks: whether one of these is broken.
    """

    name: str
    served: str
    form: str | None
    places: tuple[str, ...]
    kinds: frozenset[Kind]
    breaks: bool


def installed() -> Path:
    """Return the folder that holds the installed package ``sglang``, without importing it.

    Raises:
        EngineError: SGLang is not installed.
    """
    if (spec := find_spec("sglang")) is None or not spec.submodule_search_locations:
        raise EngineError(f"sglang is not installed; run: {support.INSTALL_SGLANG}")
    return Path(spec.submodule_search_locations[0]).parent


def forms(folder: Path) -> Callable[[str], str | None]:
    """Return a function that tells the form of a name in the SGLang of a folder; None if there is no such name."""
    sources = Sources(folder)
    # SGLang makes ServerArgs of these classes when it is imported.
    groups = (folder / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py")
    flags = {
        name for file in groups for name in re.findall(r"^    (\w+): ", file.read_text(encoding="utf-8"), re.MULTILINE)
    }

    @cache
    def form(path: str) -> str | None:
        owner, _, name = path.rpartition(".")
        return "value" if owner == _SERVER_ARGS and name in flags else sources.form(path)

    return form


def served() -> dict[str, str | None]:
    """Return the forms of all names in the release that is served; None of fields that its sources do not show."""
    names: dict[str, str | None] = json.loads(RECORD.read_text(encoding="utf-8"))["names"]
    return names


def drifts(folder: Path) -> list[Drift]:
    """Return what the SGLang in a folder changes, what breaks our code first.

    Args:
        folder: an unpacked wheel or ``python/`` of a checkout: it holds the folder ``sglang``.

    Raises:
        EngineError: it holds no SGLang.
    """
    if not (folder / "sglang" / "srt").is_dir():
        raise EngineError(
            f"{folder} has no folder sglang/srt; name the folder of an unpacked wheel, or python/ of a checkout"
        )
    form_of, known, by_name = forms(folder), served(), defaultdict(list)
    for use in uses(known.get):
        by_name[use.name].append(use)
    found = []
    for name, used in by_name.items():
        form, old = form_of(name), known[name]
        if old is not None and form != old:
            broken = [use.place for use in used if breaks(use, old, form)]
            places = tuple(dict.fromkeys([*broken, *(use.place for use in used)]))
            found.append(Drift(name, old, form, places, frozenset(use.kind for use in used), bool(broken)))
    return sorted(found, key=lambda drift: (not drift.breaks, drift.name))


def breaks(use: Use, served: str, form: str | None) -> bool:
    """Return whether the use of a name breaks where its form differs from the one that is served."""
    if use.kind == "annotation" or form is None:
        return use.kind != "annotation"
    old, new = parsed(served), parsed(form)
    if old is None or new is None or served.startswith("async") != form.startswith("async"):
        return True
    try:
        if isinstance(use.given, Call):
            new.bind(*[None] * use.given.num_positional, **dict.fromkeys(use.given.keywords))
            return _positional(old)[: use.given.num_positional] != _positional(new)[: use.given.num_positional]
        if isinstance(use.given, Signature):
            by_keyword = [one.name for one in new.parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
            use.given.bind(*_positional(new), **dict.fromkeys(by_keyword))
            named = len(_positional(use.given))
            lost = old.parameters.keys() & use.given.parameters.keys() - new.parameters.keys()
            return _positional(old)[:named] != _positional(new)[:named] or bool(lost)
    except TypeError:
        return True
    return False


def _positional(given: Signature) -> list[str]:
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in given.parameters.values() if one.kind in by_position]


def uses(form: Callable[[str], str | None]) -> Iterator[Use]:
    """Yield every use of a name that the served SGLang has.

    Args:
        form: of a name in that release.
    """
    ours = Sources(PACKAGE.parent)
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        aliases = _aliases(ours, module)
        tree = ours.module(module) or ast.Module([], [])
        guards = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        of_types = [guard for guard in guards if ast.unparse(guard.test) == "TYPE_CHECKING"]
        checked = {id(node) for guard in of_types for node in ast.walk(guard)}
        for node in ast.walk(tree):
            found = [*_names(node, aliases, form), *_hooks(node), *_subclass(ours, module, node)]
            if module == _PROTOCOLS:
                found += _fields(node)
            for where, name, kind, given in found:
                if form(name) is not None or kind == "field":
                    place = f"{file.relative_to(PACKAGE.parent)}:{getattr(where, 'lineno', 0)}"
                    yield Use(name, "annotation" if id(node) in checked and kind == "import" else kind, place, given)


_Uses = Iterator[tuple[ast.AST, str, Kind, Call | Signature | None]]
"""Where, and what else :class:`Use` has."""


def _imported(node: ast.AST) -> dict[str, str]:
    """Return what an import takes from SGLang: paths by the names that they get."""
    if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("sglang."):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Import):
        names = {alias.asname or alias.name: alias.name for alias in node.names}
        return {name: path for name, path in names.items() if f"{path}.".startswith("sglang.")}
    return {}


@cache
def _aliases(ours: Sources, module: str) -> dict[str, str]:
    """Return what a module of ours imports from SGLang anywhere."""
    tree = ours.module(module) or ast.Module([], [])
    return dict(pair for node in ast.walk(tree) for pair in _imported(node).items())


def _names(node: ast.AST, aliases: Mapping[str, str], form: Callable[[str], str | None]) -> _Uses:
    """Yield imports, attributes of what is imported, calls, and words of our tables."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((node, path, "import", None) for path in _imported(node).values())
    elif isinstance(node, ast.Attribute):
        yield from ((node, path, "import", None) for path in _dotted(node, aliases))
    elif isinstance(node, ast.Call):
        for path in _dotted(node.func, aliases):
            if form(path) == "class":
                yield node, f"{path}.__init__", "call", _call(node, is_bound=True)
                yield from ((node, f"{path}.{each.arg}", "import", None) for each in node.keywords if each.arg)
            else:
                called = parsed(form(path) or "")
                yield node, path, "call", _call(node, is_bound=called is not None and "cls" in called.parameters)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search("[A-Z.]", node.value):
        words = re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", node.value)
        yield from ((node, f"{table}.{word}", "flag", None) for table in _TABLES for word in words)


def _dotted(node: ast.AST, aliases: Mapping[str, str]) -> list[str]:
    """Return the path of an imported name, or of an attribute of one; nothing for other expressions."""
    if isinstance(node, ast.Name) and node.id in aliases:
        return [aliases[node.id]]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
        return [f"{aliases[node.value.id]}.{node.attr}"]
    return []


def _call(node: ast.Call, *, is_bound: bool) -> Call | None:
    """Return what a call gives; None if that is known only when it runs."""
    keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
    if len(keywords) < len(node.keywords) or any(isinstance(given, ast.Starred) for given in node.args):
        return None
    return Call(len(node.args) + is_bound, keywords)


def _hooks(node: ast.AST) -> _Uses:
    for given in getattr(node, "decorator_list", ()):
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "hook":
            handler = [*signature(node.args).parameters.values()]  # type: ignore[attr-defined]
            handed_first = _HANDED_FIRST.get(ast.unparse(given.args[1]).rpartition(".")[2], 0)
            yield node, ast.literal_eval(given.args[0]), "hook", Signature(handler[handed_first:])


def _subclass(ours: Sources, module: str, node: ast.AST) -> _Uses:
    """Yield the methods of SGLang's classes that a class of ours overrides or calls."""
    chain = [(each.module, each.node) for each in ours.ancestors(Found(module, node))]
    bases = {
        path
        for where, each in chain
        if isinstance(each, ast.ClassDef)
        for base in each.bases
        for path in _dotted(base, _aliases(ours, where))
    }
    for base in sorted(bases):
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name != "__init__":
                yield inner, f"{base}.{inner.name}", "override", signature(inner.args)
            elif isinstance(inner, ast.Call) and ast.unparse(inner.func).startswith("super()."):
                yield inner, f"{base}.{ast.unparse(inner.func)[8:]}", "call", _call(inner, is_bound=True)


def _fields(node: ast.AST) -> _Uses:
    """Yield the fields of SGLang's class that a protocol of ours names, but those that we set."""
    named = re.match(r"``(sglang\.[\w.]+)``", ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef) else None
    if named is None or not isinstance(node, ast.ClassDef):
        return
    lines = (PACKAGE.parent / f"{_PROTOCOLS.replace('.', '/')}.py").read_text(encoding="utf-8").splitlines()
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and not lines[member.lineno - 1].endswith("# ours"):
            yield member, f"{named[1]}.{ast.unparse(member.target)}", "field", None
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*signature(member.args).parameters.values()]
            keywords = tuple(one.name for one in given if one.kind is Parameter.KEYWORD_ONLY)
            yield member, f"{named[1]}.{member.name}", "field", Call(len(given) - len(keywords), keywords)


def write() -> None:
    """Write the forms of all names that we use, in the installed SGLang."""
    form = forms(installed())
    names = {use.name: form(use.name) for use in uses(form)}
    record = {"sglang": support.installed_sglang(), "names": dict(sorted(names.items()))}
    atomic_write_text(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write()
