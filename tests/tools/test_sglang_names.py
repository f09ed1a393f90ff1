"""Tests of the list of SGLang's names: it is complete and current, and planted changes are found by name."""

import ast
import functools
import json
import re
import shutil

import pytest

from sglang_dspark.engine.hooks import all_hooks
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.tools import sglang_names
from sglang_dspark.tools.doctor import check_sglang
from sglang_dspark.tools.sglang_names import PACKAGE, RECORD, Call, Use, breaks, drifts, forms, installed, served, uses
from sglang_dspark.tools.sglang_sources import Sources, parsed

WRITE = "run: python -m sglang_dspark.tools.sglang_names"


@pytest.fixture(scope="module")
def found():
    """Uses of names that the installed SGLang has."""
    return list(uses(forms(installed())))


@pytest.mark.slow
def test_the_record_is_of_the_installed_release(found):
    record, form = json.loads(RECORD.read_text(encoding="utf-8")), forms(installed())
    assert record["sglang"] == installed_sglang(), WRITE
    assert record["names"] == {use.name: form(use.name) for use in found}, WRITE


def test_what_cannot_be_read_is_known():
    """SGLang sets these fields where no source of their class shows them."""
    assert {name.rpartition(".")[2] for name, form in served().items() if form is None} == {
        "weight",
        "get_internal_state_communicator",
    }


@pytest.mark.slow
def test_every_hook_is_listed(found):
    assert {use.name for use in found if use.kind == "hook"} == {hook.target for hook in all_hooks()}


def test_every_import_of_sglang_is_listed():
    names = served().keys()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                assert {f"{node.module}.{alias.name}" for alias in node.names} <= names, f"{file}: {WRITE}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sglang.srt.speculative.base_spec_worker.BaseSpecWorker.__init__", "call"),
        ("sglang.srt.speculative.spec_registry.CustomSpecAlgo.create_worker", "override"),
        ("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend", "override"),
        ("sglang.srt.managers.schedule_batch.Req.output_ids", "field"),
        ("sglang.srt.managers.schedule_batch.Req.finished", "field"),
        ("sglang.srt.server_args.ServerArgs.enable_return_aux_hidden_states", "flag"),
        ("sglang.srt.environ.envs.SGLANG_HTTP_SERVER_APP_PATH", "import"),
        ("sglang.srt.managers.schedule_batch.Req", "import"),
    ],
)
def test_names_of_each_kind_are_listed(name, kind):
    assert (name, kind) in {(use.name, use.kind) for use in uses(served().get)}


def test_what_is_ours_is_not_listed():
    assert "sglang.srt.model_executor.model_runner.ModelRunner.mrope_deltas" not in served()


PLUGIN = """
from typing import TYPE_CHECKING

from sglang.srt.backend import Backend, Batch
from sglang.srt.engine.hook_registry import HookType
from sglang.srt.pools import allocate, release as free

if TYPE_CHECKING:
    from sglang.srt.pools import Pool


@hook("sglang.srt.backend.Batch.prepare", HookType.AROUND, where="scheduler", reason="")
def prepared(prepare, batch, size, *, pad):
    return prepare(batch, size, pad=pad)


@hook("sglang.srt.backend.run", HookType.BEFORE, where="scheduler", reason="")
def before(first, *others, third=None, **given): ...


class Ours(Backend):
    def __init__(self):
        super().__init__(4)

    def forward(self, batch, save=True):
        return allocate(batch, 2, device="cpu")


class Deeper(Ours):
    def finish(self): ...


made = Batch(rows=1, size=2)
"""
PROTOCOLS = '''
class Batch(Protocol):
    """``sglang.srt.backend.Batch``: rows."""

    rows: int
    late: int
    noted: int  # ours
    def prepare(self, size: int, *, pad: bool) -> None:
        """Prepare."""
'''
SGLANG = {
    "srt/backend.py": """
from dataclasses import dataclass

@dataclass
class Batch:
    rows: int
    size: int = 0

    def prepare(self, size, *, pad=False):
        self.late = 1

def run(first, second, *, third=None): ...

class Base:
    def finish(self): ...

class Backend(Base):
    def __init__(self, heads): ...
    def forward(self, batch, save=True): ...
""",
    "srt/pools/__init__.py": "from .paged import *\nfrom sglang.srt.pools.paged import drop as release\n",
    "srt/pools/paged.py": "class Pool: ...\ndef allocate(batch, count, device): ...\ndef drop(): ...\n",
    "srt/engine/hook_registry.py": "class HookType: AROUND = 1; BEFORE = 2\n",
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Compare a made-up SGLang, some texts of which are replaced, with itself: what breaks, and what does not."""

    def write(name, replaced):
        for file, text in SGLANG.items():
            path = tmp_path / name / "sglang" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(functools.reduce(lambda text, pair: text.replace(*pair), replaced.items(), text))
        return tmp_path / name

    package = tmp_path / "ours" / "sglang_dspark"
    (package / "engine").mkdir(parents=True)
    (package / "plugin.py").write_text(PLUGIN)
    (package / "engine" / "sglang_types.py").write_text(PROTOCOLS)
    monkeypatch.setattr(sglang_names, "PACKAGE", package)
    monkeypatch.setattr(sglang_names, "RECORD", tmp_path / "names.json")
    monkeypatch.setattr(sglang_names, "installed", lambda: write("served", {}))
    sglang_names.write()

    def changed(moved=(), **replaced):
        folder = write("next", dict(replaced.values()))
        for path, to in moved:
            shutil.move(folder / "sglang" / path, folder / "sglang" / to)
        found = drifts(folder)
        return [
            {drift.name.removeprefix("sglang.srt."): drift.form for drift in found if drift.breaks == broken}
            for broken in (True, False)
        ]

    return changed


def test_nothing_has_changed(planted):
    assert planted() == [{}, {}]
    assert {name.removeprefix("sglang.srt.") for name in served()} == {
        "backend.Backend",
        "backend.Backend.__init__",
        "backend.Backend.finish",
        "backend.Backend.forward",
        "backend.Batch",
        "backend.Batch.__init__",
        "backend.Batch.late",
        "backend.Batch.prepare",
        "backend.Batch.rows",
        "backend.Batch.size",
        "backend.run",
        "engine.hook_registry.HookType",
        "engine.hook_registry.HookType.AROUND",
        "engine.hook_registry.HookType.BEFORE",
        "pools.Pool",
        "pools.allocate",
        "pools.release",
    }


CHANGES = {
    "a hook's target lost a parameter": ("size, *, pad=False", "size", {"backend.Batch.prepare": "(self, size)"}, {}),
    "a hook's target gained one": (
        "prepare(self, size,",
        "prepare(self, size, rows=0,",
        {"backend.Batch.prepare": "(self, size, rows=..., *, pad=...)"},
        {},
    ),
    "a hook's target has another order": (
        "first, second",
        "second, first",
        {"backend.run": "(second, first, *, third=...)"},
        {},
    ),
    "a hook's target needs what was optional": (
        "pad=False",
        "pad",
        {},
        {"backend.Batch.prepare": "(self, size, *, pad)"},
    ),
    "a hook's target is asynchronous": (
        "def run",
        "async def run",
        {"backend.run": "async (first, second, *, third=...)"},
        {},
    ),
    "what a hook reads is gone": ("*, third=None", "", {"backend.run": "(first, second)"}, {}),
    "a hook takes whatever else comes": (
        "third=None",
        "third, fourth=1",
        {},
        {"backend.run": "(first, second, *, third, fourth=...)"},
    ),
    "a field is gone": (
        "rows: int",
        "columns: int",
        {"backend.Batch.rows": None, "backend.Batch.__init__": "(self, columns, **fields)"},
        {},
    ),
    "what a method sets is gone": ("self.late", "self.soon", {"backend.Batch.late": None}, {}),
    "a field that we do not give is required": (
        "rows: int",
        "rows: int\n    age: int",
        {"backend.Batch.__init__": "(self, rows, age, **fields)"},
        {},
    ),
    "an overridden method is given more": (
        "save=True",
        "save=True, sinks=None",
        {"backend.Backend.forward": "(self, batch, save=..., sinks=...)"},
        {},
    ),
    "an inherited method is gone": ("def finish", "def end", {"backend.Backend.finish": None}, {}),
    "the base class's start takes more": (
        "heads",
        "heads, size",
        {"backend.Backend.__init__": "(self, heads, size)"},
        {},
    ),
    "a function that we call may take more": (
        "count, device",
        "count, device, dtype=None",
        {},
        {"pools.allocate": "(batch, count, device, dtype=...)"},
    ),
    "arguments of a call changed places": (
        "batch, count, device",
        "count, batch, device",
        {"pools.allocate": "(count, batch, device)"},
        {},
    ),
    "what only annotates is gone": ("class Pool", "class Cache", {}, {"pools.Pool": None}),
}


@pytest.mark.parametrize(("old", "new", "broken", "harmless"), CHANGES.values(), ids=CHANGES)
def test_a_planted_change_is_found(planted, old, new, broken, harmless):
    assert planted(one=(old, new)) == [broken, harmless]


def test_a_module_that_moved_is_found(planted):
    gone, harmless = planted(moved=[("srt/pools", "srt/memory")])
    assert gone == {"pools.allocate": None, "pools.release": None}
    assert harmless == {"pools.Pool": None}


def test_a_definition_may_move_behind_an_import(planted):
    assert planted(moved=[("srt/pools/paged.py", "srt/pools/blocks.py")], one=("paged", "blocks")) == [{}, {}]


@pytest.mark.parametrize(
    ("form", "count", "keywords", "broken"),
    [
        ("(a, b)", 2, (), False),
        ("(a, b, c)", 2, (), True),
        ("(a, b, c=...)", 2, (), False),
        ("(a, b, *, c)", 2, ("c",), False),
        ("(a)", 1, ("c",), True),
        ("(a, b, /, **others)", 2, ("c",), False),
        ("value", 1, (), True),
        (None, 1, (), True),
    ],
)
def test_a_call_has_to_fit(form, count, keywords, broken):
    assert breaks(Use("name", "call", "place", Call(count, keywords)), "(a, b, c=...)", form) == broken


@pytest.mark.parametrize("form", ["(a, /, b, c=..., *d, e, f=..., **g)", "async (*, a)", "()"])
def test_forms_are_read_as_they_are_written(tmp_path, form):
    (tmp_path / "module.py").write_text(f"{form.replace('(', 'def function(', 1)}: ...")
    assert Sources(tmp_path).form("module.function") == form
    assert parsed(form) is not None and parsed("value") is None


def test_modules_that_import_each_other_whole_end(tmp_path):
    (tmp_path / "one.py").write_text("from two import *")
    (tmp_path / "two.py").write_text("from one import *\nfrom one import name")
    assert Sources(tmp_path).form("one.name") is None


def test_doctor_says_what_changed(tmp_path, planted):
    planted(one=("second, *", "second, more=None, *"), two=("def finish", "def end"))
    *changes, summary = check_sglang(tmp_path / "next")
    assert [(change.status, change.subject, change.found.partition("; used in")[0]) for change in changes] == [
        ("fail", "override", "sglang.srt.backend.Backend.finish is gone; it was (self)"),
        (
            "note",
            "hook",
            "sglang.srt.backend.run was (first, second, *, third=...) and is (first, second, more=..., *, third=...)",
        ),
    ]
    assert re.search(r"; used in sglang_dspark/plugin.py:\d+$", changes[0].found)
    assert summary.status == "note"
    assert summary.found.startswith(
        "of 17 names of SGLang that the plugin uses, 15 are as in the release that is served"
    )


def test_doctor_refuses_a_folder_without_sglang(tmp_path):
    [finding] = check_sglang(tmp_path)
    assert finding.status == "fail" and "name the folder of an unpacked wheel" in finding.found
