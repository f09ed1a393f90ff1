"""Tests of the hooks on SGLang: every row names functions that exist and that fit each other.

A hook on a function that SGLang no longer calls is named.
"""

import inspect
import os
import pkgutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_objects import partly

from sglang_dspark.engine import hooks
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.hooks import Moment, Where, all_hooks, check_called, expect_called
from sglang_dspark.engine.worker_base import SpecWorkerBase
from sglang_dspark.errors import EngineError
from sglang_dspark.worker.worker import DSparkWorker

HOOKS = all_hooks()
PACKAGE = Path(hooks.__file__).parents[1]
HANDED_FIRST = {HookType.BEFORE: 0, HookType.AFTER: 1, HookType.AROUND: 1, HookType.REPLACE: 0}


def names(function, *kinds):
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_names_and_targets_are_told_apart():
    assert len({hook.name for hook in HOOKS}) == len({(hook.target, hook.handler) for hook in HOOKS}) == len(HOOKS)
    assert {hook.where for hook in HOOKS} == set(get_args(Where))


def in_each_others_way(hooks):
    """Hooks on one target that are not all before or after it."""
    placed = Counter((hook.target, hook.where) for hook in hooks)
    several = [hook for hook in hooks if placed[hook.target, hook.where] > 1]
    return [hook for hook in several if hook.kind not in (HookType.BEFORE, HookType.AFTER)]


@pytest.mark.parametrize("kind", HookType)
def test_several_hooks_on_one_target_stand_before_or_after_it(kind):
    """SGLang warns of several that stand around one, and of several that replace it the last one counts."""
    assert in_each_others_way(HOOKS) == []
    twice = [replace(HOOKS[0], kind=kind)] * 2
    assert bool(in_each_others_way([*twice, *HOOKS[1:]])) == (kind not in (HookType.BEFORE, HookType.AFTER))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_handler_takes_what_its_target_is_given(hook):
    """SGLang hands the target's arguments on, and a handler that cannot take them fails in a running server."""
    target = inspect.unwrap(hook.load_target())
    arguments = names(target, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments += ["cls"] * inspect.ismethod(target)
    keywords = dict.fromkeys(names(target, inspect.Parameter.KEYWORD_ONLY))
    inspect.signature(hook.handler).bind(*[None] * HANDED_FIRST[hook.kind], *arguments, **keywords)


def test_a_function_of_sglang_that_is_gone_is_seen():
    with pytest.raises((AttributeError, ImportError)):
        replace(HOOKS[0], target=HOOKS[0].target + "_gone").load_target()


def test_every_hook_that_is_declared_is_installed_somewhere():
    """A module of the core that is not named for the place of its hooks would be imported by no process."""
    declared = sum(path.read_text().count("\n@hook(") for path in PACKAGE.rglob("*.py"))
    assert declared == len(HOOKS) > 50


class Registry:
    """SGLang's registry: it logs what it cannot patch, and patches a target once."""

    def __init__(self, patched=()):
        self._patched, self.registered = set(patched), []

    def register(self, target, handler, kind, *, source):
        assert source == ("dspark", "sglang-dspark")  # or SGLang's log calls our hooks "unknown"
        self.registered.append(target)

    def apply_hooks(self):
        for target in self.registered:
            try:
                pkgutil.resolve_name(target)
            except AttributeError:
                continue
            self._patched.add(target)


@pytest.fixture
def install(monkeypatch):
    def install(*places, rows=HOOKS, patched=(), used=(True, True)):
        registry = Registry(patched)
        monkeypatch.setattr(hooks, "HookRegistry", registry)
        declared = {module: [row for row in rows if row.handler.__module__ == module] for module in hooks._declared}
        monkeypatch.setattr(hooks, "_declared", declared)
        features = [replace(feature, is_used=lambda args: args == "uses all") for feature in all_features()]
        monkeypatch.setattr(hooks, "all_features", lambda: features)
        monkeypatch.setattr(hooks, "_installed", set())
        monkeypatch.setattr(hooks, "expect_called", lambda name, target, moment, handler: handler)
        for uses_all in used:
            hooks.install("uses all" if uses_all else "uses none", *places)
        return registry.registered

    return install


def test_a_place_gets_its_hooks_once(install):
    assert install("routes") == [hook.target for hook in HOOKS if hook.where == "routes"]
    assert install("front_end") == [hook.target for hook in HOOKS if hook.where == "front_end"]
    assert install("scheduler", "cpu") == [hook.target for hook in HOOKS if hook.where in ("scheduler", "cpu")]


def test_hooks_of_a_feature_are_left_out_where_it_is_not_used(install):
    of_features = {
        hook.target for hook in HOOKS if hook.where == "scheduler" and ".features." in hook.handler.__module__
    }
    found = install("scheduler", used=(False, False))
    assert set(install("scheduler")) - set(found) == of_features
    assert not set(found) & of_features and of_features


def test_a_hook_that_would_come_after_another_one_on_its_target_is_refused(install):
    """SGLang would drop it without a word: what hooks a target of the core has to be used by every server."""
    core = next(hook for hook in HOOKS if hook.where == "scheduler")
    feature = next(hook for hook in HOOKS if hook.where == "scheduler" and ".features." in hook.handler.__module__)
    rows = [core, replace(feature, target=core.target)]
    with pytest.raises(EngineError, match=rf"hook {rows[1].name} finds .* patched"):
        install("scheduler", rows=rows, used=(False, True))


def test_a_target_that_another_plugin_has_patched_is_refused(install):
    [first, *_] = [hook for hook in HOOKS if hook.where == "routes"]
    with pytest.raises(EngineError, match=f"hook {first.name} finds {first.target} patched by another plugin"):
        install("routes", patched=[first.target])


def test_a_hook_that_does_not_take_effect_is_refused(install):
    gone = replace(HOOKS[0], target=HOOKS[0].target + "_gone")
    with pytest.raises(EngineError, match=f"hook {gone.name} did not take effect on {gone.target}"):
        install(gone.where, rows=[gone])


def test_methods_are_not_looked_for_among_the_names_of_all_modules(monkeypatch):
    """SGLang would, in each process, for each hook: seconds at start-up."""
    owner = ModuleType("hooked_here")
    owner.Kind, owner.function = type("Kind", (), {"method": lambda self: 1}), lambda: 1
    importer = ModuleType("imports_by_name")
    importer.taken, importer.method = owner.function, owner.Kind.method
    for module in (owner, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    registry = type("Registry", (HookRegistry,), {"_hooks": defaultdict(list), "_patched": set()})
    monkeypatch.setattr(hooks, "HookRegistry", registry)
    for target in ("function", "Kind.method"):
        registry.register(f"hooked_here.{target}", lambda *_: 2, HookType.REPLACE)
    find = hook_registry._propagate_patch
    hooks._apply()
    assert (owner.function(), owner.Kind().method(), importer.taken(), importer.method(None)) == (2, 2, 2, 1)
    assert hook_registry._propagate_patch is find


@pytest.fixture
def nothing_expected(monkeypatch):
    monkeypatch.setattr(hooks, "_expected", type(hooks._expected)(dict))


@pytest.mark.usefixtures("nothing_expected")
def test_a_hook_that_was_never_called_is_named():
    called = expect_called("called", "sglang.called", Moment.READY, lambda x: x + 1)
    expect_called("dead", "sglang.dead", Moment.READY, lambda x: x)
    expect_called("later", "sglang.later", Moment.ANSWERED, lambda x: x)
    assert called(1) == 2
    with pytest.raises(
        EngineError, match=r"had not called sglang\.dead when the scheduler was ready, so the hook dead"
    ):
        check_called(Moment.READY)


@pytest.mark.usefixtures("nothing_expected")
def test_hooks_that_were_called_pass():
    called = expect_called("called", "sglang.called", Moment.READY, lambda: None)
    expect_called("whenever", "sglang.whenever", Moment.SOME_TIME, lambda: None)
    called()
    check_called(Moment.READY)
    check_called(Moment.ANSWERED)


@pytest.mark.usefixtures("nothing_expected")
def test_a_forked_process_waits_only_for_its_own_hooks():
    expect_called("of the parent", "sglang.dead", Moment.READY, lambda: None)
    child = os.fork()
    if child == 0:
        try:
            check_called(Moment.READY)
        except EngineError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(EngineError):
        check_called(Moment.READY)


@pytest.mark.usefixtures("nothing_expected")
def test_hooks_are_looked_for_when_a_step_has_been_processed():
    expect_called("dead", "sglang.dead", Moment.ANSWERED, lambda: None)
    with pytest.raises(EngineError, match="when the first request had been answered"):
        SpecWorkerBase.observe(partly(DSparkWorker), result=None, batch=None)


def test_a_process_without_dspark_imports_no_feature():
    probe = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "print([name for name in sys.modules if name.startswith('sglang_dspark.features.')])"
    )
    output = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "[]"
