"""Tests of properties that every function with kernels has, at the sizes of tests/support/kernel_cases.py.

Kernels compile for GPUs that are not here. Steps in torch read nothing back, which tensors of the device "meta" show:
they have no values. A file whose name continues another one's is a part of it, and callers never ask for the device.
"""

import ast
import importlib
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import dspark_kernels
import pytest
import torch
from acceptance_cases import assert_equal_but_for_rounding
from dspark_kernels import (
    QUANTILES,
    Dispatched,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    RoundKeys,
    SamplingBatch,
    SimulatedDraws,
    Windows,
    accept,
    dispatch,
    draft_block,
    kernels_anywhere,
    on_kernels,
    runs_kernels,
    simulated_accept,
)
from kernel_calls import Made
from kernel_cases import CASES
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FILLS = [float("nan"), 1e30]
SIZES = [
    pytest.param(name, dtype, size, id="-".join(map(str, (name, str(dtype).removeprefix("torch."), *size))))
    for name, case in CASES.items()
    for number, size in enumerate(case.sizes)
    for place, dtype in enumerate(case.dtypes)
    # Every size in one dtype at least, and every dtype at one size.
    if number % len(case.dtypes) == place or number < 1
]


@pytest.mark.parametrize(("name", "dtype", "size"), SIZES)
def test_kernel_equals_reference(name, dtype, size, device):
    case, function = CASES[name], getattr(dspark_kernels, name)
    both = Made(device, dtype), Made(device, dtype)
    forms = zip((function, function.reference), both, strict=True)
    found, expected = (case.call(form, made, *size) for form, made in forms)
    assert case.in_place or all(torch.equal(given, before) for made in both for given, before in made.given)
    for kernel, reference in zip(found, expected, strict=True):
        if dtype in case.tolerance:
            torch.testing.assert_close(kernel, reference, **case.tolerance[dtype])
        elif kernel.is_floating_point() and kernel.numel():
            assert_equal_but_for_rounding(kernel, reference)
        else:
            assert kernel.dtype == reference.dtype and torch.equal(kernel, reference)


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_padding_changes_no_real_row(name, fill, device):
    """Whatever stands in rows of padding, real rows get the same, to the bit."""
    case, function = CASES[name], getattr(dspark_kernels, name)
    for form in (function, function.reference):
        expected, found = (case.call(form, Made(device, fill=padding), *case.sizes[0]) for padding in (None, fill))
        for clean, beside_padding in zip(expected, found, strict=True):
            assert torch.equal(clean, beside_padding)
            assert not clean.is_floating_point() or clean.isfinite().all()


def test_every_function_with_kernels_has_a_case():
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(dspark_kernels.__path__, "dspark_kernels.")
    ]
    functions = {name for module in modules for name, value in vars(module).items() if isinstance(value, Dispatched)}
    assert functions == CASES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unwritten_numbers_are_nan(dtype):
    like = torch.zeros(5, dtype=dtype)
    for made in (torch.empty(5, dtype=dtype), torch.empty_like(like), like.new_empty(5), like.new_empty((2, 3))):
        assert made.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_unwritten_integers_are_no_index_and_no_length(dtype):
    values = torch.empty(5, dtype=dtype).tolist()
    assert all(value < -(2**30) or value in (0x5A, True) for value in values)


ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "dspark_kernels"


def kernels() -> set[str]:
    """Functions that Triton compiles and that are launched; others are helpers of theirs."""
    sources = "".join(path.read_text() for path in KERNELS.rglob("*.py"))
    return {name for name in re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE) if f"{name}[" in sources}


@pytest.mark.slow
@pytest.mark.parametrize("forms", [["--first-forms"], pytest.param([], marks=pytest.mark.thorough)], ids=["one", "all"])
def test_every_kernel_compiles_and_fits(forms, tmp_path):
    """Kernels compile for the least shared memory that SGLang serves with; `make evidence` tries the others."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels" / "compile_for.py")]
    options = ["--capability", "89", *forms, "--output", str(tmp_path / "compiled.json")]
    result = subprocess.run(
        command + options, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = json.loads((tmp_path / "compiled.json").read_text())["kernels"]
    assert {kernel["kernel"] for kernel in compiled} == kernels()
    assert len(kernels()) > 10
    assert all(0 < kernel["registers"] <= 255 for kernel in compiled)


BS, GAMMA, VOCAB = 6, 4, 9001
GREEDY, PLAIN, SEEDED = (0.0, -1, 1.0, 0.0, None), (1.0, -1, 1.0, 0.0, None), (0.8, -1, 0.9, 0.1, 5)
NUCLEUS, TOP_K = (1.0, -1, 0.9, 0.0, None), (1.0, 20, 0.9, 0.0, None)
BATCHES = {
    "greedy": [GREEDY] * BS,
    "plain": [PLAIN] * BS,
    "nucleus": [NUCLEUS] * BS,
    "seeded": [SEEDED] * BS,
    "mixed": [GREEDY, PLAIN, SEEDED, NUCLEUS, TOP_K, GREEDY],
    "few-sampled": [GREEDY, GREEDY, GREEDY, GREEDY, TOP_K, GREEDY],
}


class Step:
    """Calls on a batch with these rules, whose tensors are there before they are called."""

    def __init__(self, rules, device):
        def floats(*shape):
            return torch.zeros(shape, device=device)

        def ints(*shape):
            return torch.zeros(shape, device=device, dtype=torch.int64)

        columns = (list(column) for column in zip(*rules, strict=True))
        self.batch = SamplingBatch.from_lists(*columns, device=device), RoundKeys(1, ints(), ints(BS), ints(BS))
        lens, indptr = ints(BS) + GAMMA, torch.arange(BS + 1, device=device) * (GAMMA + 1)
        distribution = DraftDistribution(floats(BS, GAMMA, VOCAB), floats(BS, GAMMA) + math.log(VOCAB))
        block = DraftBlock(ints(BS, GAMMA), distribution=distribution, copied=floats(BS, GAMMA) > 0)
        empty = DraftBlock(ints(BS, 0), copied=floats(BS, 0) > 0)
        of_drafts = floats(BS, GAMMA, VOCAB), floats(BS, GAMMA, 2), ints(BS), DraftHeads()
        windows, nothing, logits = Windows(lens, indptr), Windows(ints(BS), indptr), floats(BS * (GAMMA + 1), VOCAB)
        draws, simulated = SimulatedDraws(ints(BS), floats(GAMMA, QUANTILES)), simulated_accept.reference
        self.calls = {
            "draft": lambda: draft_block.reference(*of_drafts, *self.batch).tokens,
            "accept": lambda: accept.reference(block, windows, logits, lens, *self.batch).out_tokens,
            "accept nothing": lambda: accept.reference(empty, nothing, logits, lens, *self.batch).out_tokens,
            "simulate": lambda: simulated(draws, ints(BS), lens, ints(BS, GAMMA), lens, lens).out_tokens,
        }


@pytest.mark.parametrize("rules", BATCHES.values(), ids=BATCHES)
def test_nothing_is_read_back(rules):
    shapes = {name: tuple(call().shape) for name, call in Step(rules, "meta").calls.items()}
    whole = (BS, GAMMA + 1)
    assert shapes == {
        "draft": (BS, GAMMA),
        "accept": whole,
        "accept nothing": (BS, 1),
        "simulate": whole,
    }
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, device="meta").nonzero()


class VocabularySizedResults(TorchFunctionMode):
    """Records every operation that writes a new tensor with at least V elements."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.numel() >= VOCAB and leaf.untyped_storage().data_ptr() not in known:
                self.operations.append(func.__name__)
        return result


@pytest.mark.parametrize("name", ["draft", "accept"])
def test_greedy_batches_write_nothing_of_vocabulary_size(name):
    for rule, writes in ((GREEDY, False), (PLAIN, True)):
        call = Step([rule] * BS, "cpu").calls[name]
        with VocabularySizedResults() as seen:
            call()
        assert bool(seen.operations) == writes, seen.operations


@dataclass
class Held:
    number: int
    inside: tuple | None
    tensor: torch.Tensor


@pytest.fixture
def nowhere():
    """Dispatch runs as it does outside of these tests."""
    with patch.object(dispatch, "_anywhere", []):
        yield


@on_kernels(lambda *args, **kwargs: "reference")
def form(*args, **kwargs):
    """Return the name of the form that runs."""
    return "kernel"


TENSOR = torch.zeros(2)
CALLS = [((TENSOR,), {}), ((1, None, TENSOR), {}), ((Held(1, None, TENSOR),), {}), ((), {"late": TENSOR}), ((), {})]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_the_reference_runs_where_there_is_no_gpu(nowhere, args, kwargs):
    assert form(*args, **kwargs) == "reference"
    with kernels_anywhere():
        assert form(*args, **kwargs) == "kernel"
        with kernels_anywhere():
            pass
        assert form(*args, **kwargs) == "kernel"
    assert form(*args, **kwargs) == "reference"


@pytest.mark.parametrize(("args", "kwargs"), CALLS[:-1])
def test_the_kernel_runs_where_the_first_tensor_is_on_a_gpu(nowhere, args, kwargs):
    with patch.object(dispatch, "runs_kernels", lambda tensor: tensor is TENSOR):
        assert form(*args, **kwargs) == "kernel"
        assert form(torch.zeros(3), *args, **kwargs) == "reference"


def test_both_forms_and_the_docstring_are_at_hand():
    assert isinstance(form, Dispatched)
    assert form.kernel() == "kernel" and form.reference() == "reference"
    assert form.__doc__ == "Return the name of the form that runs." and form.__name__ == "form"


def test_an_error_leaves_the_switch_as_it_was(nowhere):
    with pytest.raises(KeyError), kernels_anywhere():
        raise KeyError
    assert not runs_kernels(TENSOR)


MAX_PARAMETERS, MAX_HOST_LINES = 8, 70


def sources(folder=KERNELS):
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def dispatched(source):
    """Names of the functions that have kernels, with those of their references."""
    return {name: ref for ref, name in re.findall(r"^@on_kernels\((\w+)\)\ndef (\w+)\(", source, re.MULTILINE)}


def test_every_function_with_kernels_has_a_reference_and_is_timed():
    timed = "".join(path.read_text() for path in (ROOT / "benchmarks" / "kernels").glob("cases_*.py"))
    code = "\n".join(sources().values())
    assert len(dispatched(code)) > 20
    for name, reference in dispatched(code).items():
        assert reference == f"{name}_ref" and f"def {reference}(" in code, name
    # Others call these.
    launching = "\n".join(
        source for source in sources().values() if re.search(r"@triton\.jit|_kernels? import", source)
    )
    for name in dispatched(launching):
        assert re.search(rf"\b{name}\b", timed), name


def test_every_kernel_is_launched_by_a_function_that_has_a_reference():
    """By one of its module, or of a module that imports it."""
    kernels = {
        path: source for path, source in sources().items() if re.search(r"^def \w+_kernel\(", source, re.MULTILINE)
    }
    assert len(kernels) > 12
    for path in kernels:
        name = ".".join(path.relative_to(KERNELS.parent).with_suffix("").parts)
        users = [source for other, source in sources().items() if other == path or f"from {name} import" in source]
        assert any(dispatched(source) for source in users if "__all__" not in source), path


def test_no_module_is_hidden_by_a_function_of_the_package():
    modules = {path.stem for path in KERNELS.glob("*.py")} | {path.name for path in KERNELS.iterdir() if path.is_dir()}
    assert modules & set(dspark_kernels.__all__) == set()


def test_callers_never_ask_for_the_device():
    """They call what is dispatched."""
    for path, source in (sources(ROOT / "sglang_dspark") | sources(ROOT / "training")).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dspark_kernels"):
                assert node.module == "dspark_kernels", f"{path}: the package's own names are its public face"


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
