"""Callers never know where a function runs."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from dspark_kernels import Dispatched, dispatch, kernels_anywhere, on_kernels, runs_kernels


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
