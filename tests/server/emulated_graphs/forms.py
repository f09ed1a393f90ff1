"""Notes the forms of kernels that a GPU would have compiled, by Triton's own rule: an interpreter compiles nothing.

A form that comes up after ``worker.warm_up`` would have been compiled while a request waits, and is written to the log.
"""

import logging
from contextlib import contextmanager

import faults
import launches
import order
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

logger = logging.getLogger(__name__)

# What these kernels say of the steps of a warm-up is not read, and to interpret them takes half of its time.
UNREAD = "dspark_kernels.acceptance.acceptance"

_binders, _known = {}, set()
_state = {"warm": False, "serving": False, "launching": True, "checking": False}


def watch():
    """Note the form of every launch from now on."""
    launch = InterpretedFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if self.fn.__module__.startswith("dspark_kernels"):
            note(self, args, kwargs)
        is_read = _state["warm"] or not self.fn.__module__.startswith(UNREAD)
        if _state["checking"] or (_state["launching"] and is_read):
            with launches.one("kernel"), order.kernel([*args, *kwargs.values()]):
                launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run
    compute_what_is_checked()


def bind(function, args, kwargs):
    """Return the arguments of one launch, what Triton distinguishes them by, and the options."""
    if function not in _binders:
        known = function if isinstance(function, JITFunction) else JITFunction(function.fn, **function.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        _binders[function] = create_function_from_signature(known.signature, known.params, backend)
    return _binders[function](*args, **kwargs)


def note(function, args, kwargs):
    """Note the form of one launch."""
    bound, specialization, options = bind(function, args, kwargs)
    form = (function.__name__, str(specialization), str(sorted(options.items())))
    if form not in _known and _state["warm"]:
        arguments = ", ".join(f"{name}: {value}" for name, value in zip(bound, specialization, strict=True))
        logger.warning("compiled while serving: %s(%s) %s", function.__name__, arguments, options)
    _known.add(form)


@contextmanager
def noted_only():
    """Let launches inside the block compute nothing."""
    before, _state["launching"] = _state["launching"], False
    try:
        yield
    finally:
        _state["launching"] = before


def compute_what_is_checked():
    """Have the self-check run the kernels themselves, whatever takes their places in a warm-up."""
    from sglang_dspark.worker import self_check

    def both_forms(function, *args, original=self_check.both_forms):
        _state["checking"], kernel = True, function.kernel
        try:
            if faults.planted(kernel.__name__):
                function.kernel = faults.faulty(function)
            return original(function, *args)
        finally:
            _state["checking"], function.kernel = False, kernel

    self_check.both_forms = both_forms


def checking():
    """Return whether a kernel is compared with its reference."""
    return _state["checking"]


def warming_up():
    """Return whether the server still prepares to serve."""
    return not _state["warm"]


def serving():
    """Return whether a step of a request has begun; before that, no drafted block is read."""
    return _state["serving"]


def start_serving():
    """Note that the first step of a request begins."""
    _state["serving"] = True


def end_of_warm_up():
    """Note that each new form from now on has been forgotten by the warm-up."""
    _state["warm"] = True
    logger.warning("forms of kernels compiled at start-up: %d", len(_known))
