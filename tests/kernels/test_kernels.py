"""Properties of every function with kernels, at the sizes of its case: tests/support/kernel_cases.py."""

import importlib
import pkgutil

import dspark_kernels
import pytest
import torch
from dspark_kernels import Dispatched
from kernel_calls import Made
from kernel_cases import CASES
from rounding import assert_equal_but_for_rounding

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
