"""Rules of the layout that no single module can see."""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dspark.features import FEATURES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglang_dspark"
KERNELS = ROOT / "kernels" / "dspark_kernels"
TRAINING = ROOT / "training" / "dspark_training"
MAX_LINES = 450
KERNEL_IMPORTS = {"torch", "triton", "dspark_kernels"}
# Every part of the package may import these.
BASE = {"__init__", "declared", "errors", "files"}
# Parts that each part may import besides; what serves imports no tool.
MAY_IMPORT = {
    "hub": set(),
    "on_cpu": set(),
    "gpu_paths": set(),
    "config": {"gpu_paths"},
    "step": set(),
    "draft": set(),
    "scheduling": set("config hub step".split()),
    # Of features only their list: see test_nothing_outside_a_feature_knows_it.
    "engine": set("config draft features hub scheduling step".split()),
    "features": set("config draft engine gpu_paths hub scheduling step".split()),
    "worker": set("config draft engine gpu_paths hub scheduling step".split()),
    "plugin": {"config", "engine", "worker"},
    "tools": set("config draft engine hub on_cpu scheduling step".split()),
    "__main__": {"tools"},
}


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imported_roots(source: str) -> Iterator[str]:
    """Top-level packages that a module imports anywhere, function bodies and importlib calls included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (
                str(argument.value).partition(".")[0] for argument in node.args if isinstance(argument, ast.Constant)
            )


def modules(package: Path) -> dict[str, Path]:
    """Modules of a package by name, ``__init__`` included."""
    return {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in python_files(package)}


def imports_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """For each module the others that it imports anywhere: in functions and for type checking, too."""
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                beside = module.rsplit(".", node.level)[:1] if node.level else []
                base = ".".join([*beside, *([node.module] if node.module else [])])
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        found[module] = {target for name in names for target in (name, f"{name}.__init__") if target in known} - {
            module
        }
    return found


def part_of(module: str) -> str:
    """The part of the package that a module belongs to."""
    return module.split(".")[1]


def in_package(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_only_engine_and_features_import_sglang():
    seams = {PACKAGE / "engine", PACKAGE / "features"}
    outside = [path for path in python_files(PACKAGE, KERNELS, TRAINING) if not seams & set(path.parents)]
    assert len(outside) > 20
    offenders = [in_package(path) for path in outside if "sglang" in imported_roots(path.read_text())]
    assert offenders == []


def test_every_part_imports_only_what_it_may():
    imports = imports_of(modules(PACKAGE))
    assert imports["sglang_dspark.worker.worker"] > {
        "sglang_dspark.worker.graphs",
        "sglang_dspark.step.state",
    }
    strays = {
        (module, target)
        for module, targets in imports.items()
        for target in targets
        if part_of(target) not in {part_of(module), *BASE, *MAY_IMPORT.get(part_of(module), set())}
    }
    assert strays == set()


@pytest.mark.parametrize("package", [PACKAGE, KERNELS, TRAINING], ids=lambda path: path.name)
def test_no_import_circles(package: Path):
    """Imports for type checking and inside functions included; a package's ``__init__`` only gathers its modules."""
    known = {name: path for name, path in modules(package).items() if path.name != "__init__.py"}
    graph = imports_of(known)
    assert sum(map(len, graph.values())) > len(graph) / 2
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which lists the circle


def test_nothing_outside_a_feature_knows_it():
    """Neither the core nor another feature: each declares itself, and has a line in the list."""
    knowing = {
        (in_package(path), name)
        for name in FEATURES
        for path in python_files(PACKAGE, KERNELS, TRAINING)
        if PACKAGE / "features" / name not in (*path.parents, path.with_suffix(""))
        and f"features.{name}" in path.read_text()
    }
    assert knowing == set()


def test_the_seam_does_not_lean_on_the_worker():
    """The plugin's entry point tells the seam which worker to make."""
    engine = python_files(PACKAGE / "engine", PACKAGE / "features")
    assert len(engine) > 20
    assert {in_package(path) for path in engine if "sglang_dspark.worker" in path.read_text()} == set()


def test_kernels_import_only_torch_and_triton():
    allowed = KERNEL_IMPORTS | sys.stdlib_module_names
    offenders = {
        in_package(path): extra
        for path in python_files(KERNELS)
        if (extra := set(imported_roots(path.read_text())) - allowed)
    }
    assert offenders == {}


def test_only_commands_know_the_trainer():
    """``train`` is a name in the table of commands; ``evaluate`` replays. No server imports it."""
    knowing = {in_package(path) for path in python_files(PACKAGE, KERNELS) if "dspark_training" in path.read_text()}
    commands = ("__init__", "measure")
    assert knowing == {f"sglang_dspark/tools/cli/{name}.py" for name in commands}


def test_modules_stay_small():
    sizes = {in_package(path): len(path.read_text().splitlines()) for path in python_files(PACKAGE, KERNELS, TRAINING)}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


def test_there_is_no_grab_bag_module():
    names = {path.stem for path in python_files(PACKAGE, KERNELS, TRAINING)}
    assert names & {"utils", "util", "helpers", "common", "misc"} == set()


def test_no_module_may_hide_the_hub_package_named_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


LIGHT = ("sglang_dspark", "sglang_dspark.plugin", "sglang_dspark.tools.cli", "sglang_dspark.tools.launch")


@pytest.mark.parametrize("module", [*LIGHT, "sglang_dspark.draft.config"])
def test_import_stays_light(module: str):
    """SGLang imports the plugin in every process, and `--help` should not take seconds."""
    probe = f"import sys, {module}; print(sorted({{'torch', 'sglang', 'triton', 'transformers'}} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_every_file_that_is_not_python_is_packaged():
    """Files that the code reads also have to be in the wheel."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sglang_dspark"]
    packaged = {path for pattern in data for path in PACKAGE.glob(pattern)}
    beside = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(beside) > 5
    assert {in_package(path) for path in beside - packaged} == set()
