"""A kernel's reference, wrapper and test share one name, cases launch it, and callers never ask for the device.

A file is a part of another one in its folder whose name it continues: ``walk_kernel.py`` belongs to ``walk.py``, and
what both hold is found in ``test_walk*.py`` and, as all of their folder, in ``cases_drafting.py``. Device code that is
never launched needs no case.
"""

import ast
import re
from pathlib import Path

import dspark_kernels

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "dspark_kernels"
MAX_PARAMETERS, MAX_HOST_LINES = 8, 70


def sources(folder=KERNELS):
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def stem_of(path):
    """The file that ``path`` is a part of, itself included."""
    others = [other for other in path.parent.glob("*.py") if path.stem.startswith(f"{other.stem}_")]
    return min(others, key=lambda other: len(other.stem), default=path)


def stems():
    """Sources of every stem with device code, joined."""
    parts = {}
    for path, source in sources().items():
        parts.setdefault(stem_of(path), []).append(source)
    joined = {path: "\n".join(texts) for path, texts in parts.items()}
    return {path: source for path, source in joined.items() if "@triton.jit" in source}


def dispatched(source):
    """Names of the functions that have kernels, with those of their references."""
    return {name: ref for ref, name in re.findall(r"^@on_kernels\((\w+)\)\ndef (\w+)\(", source, re.MULTILINE)}


def missing_partners(path, source):
    """Return what a stem lacks."""
    tests = "\n".join(test.read_text() for test in (ROOT / "tests" / "kernels").glob(f"test_{path.stem}*.py"))
    if not tests:
        return [f"tests/kernels/test_{path.stem}.py"]
    if not re.search(r"^def \w+_kernel\(", source, re.MULTILINE):
        return []
    launches = ROOT / "benchmarks" / "kernels" / f"cases_{path.parent.name}.py"
    if not launches.exists():
        return [f"benchmarks/kernels/{launches.name}"]
    functions = dispatched(source)
    lacking = [] if functions else [f"a function of {path.name} that is decorated with on_kernels"]
    for name, reference in functions.items():
        lacking += [] if reference == f"{name}_ref" else [f"{name}_ref, the name of the reference of {name}"]
        lacking += [] if f"def {reference}(" in source else [f"{reference} beside {name}"]
        lacking += [
            f"{name} in {place}"
            for place, text in (("tests", tests), (launches.name, launches.read_text()))
            if name not in text
        ]
    return lacking


def test_every_kernel_has_its_partners():
    assert len(stems()) > 12
    assert {path.name: lacking for path, source in stems().items() if (lacking := missing_partners(path, source))} == {}


def test_no_module_is_hidden_by_a_function_of_the_package():
    modules = {path.stem for path in KERNELS.glob("*.py")} | {path.name for path in KERNELS.iterdir() if path.is_dir()}
    assert modules & set(dspark_kernels.__all__) == set()


def test_callers_never_ask_for_the_device():
    """They call what is dispatched; a reference has no business in what serves or trains."""
    for path, source in (sources(ROOT / "sglang_dspark") | sources(ROOT / "training")).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dspark_kernels"):
                assert node.module == "dspark_kernels", f"{path}: the package's own names are its public face"
                assert not [alias.name for alias in node.names if alias.name.endswith("_ref")], path


def host_functions():
    for path, source in sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "triton.jit" not in ast.unparse(node).split("\ndef ")[0]:
                yield f"{path.stem}.{node.name}", node


def test_host_functions_are_short_and_take_few_arguments():
    large = {}
    for name, node in host_functions():
        parameters = [a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
        size = (len(parameters), node.end_lineno - node.lineno + 1)
        if size[0] > MAX_PARAMETERS or size[1] > MAX_HOST_LINES:
            large[name] = size
    assert large == {}
