"""Reports what a decode step reads back from its tensors: on a GPU that would wait for everything launched before.

A CPU has no device to wait for, so every operation counts that has to know values. Host tensors look like any other
here; the places that read those, and what stands for the target's kernels on a CPU, are named below.
"""

import logging
import traceback
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.equal.default,
}
METHODS = ("item", "tolist", "numpy", "cpu")
# What stands for something that a GPU does without reading: (file, function), None for every function of the file.
EMULATED = {
    ("interpreter.py", None),
    ("replays.py", "overwrite"),
    ("torch_native_backend.py", None),
    ("ragged.py", None),
    ("window.py", "window_attention_ref"),
}
# Branches that are only a CPU's, and tensors that are the host's.
ON_THE_HOST = {
    ("verify.py", "_context_groups"),
    ("verify.py", "run_verify"),  # lengths as SGLang's scheduler knows them
    ("verification.py", "joined"),  # the same
}
# Those that wait, and say so in the documentation: the policies early-stop and threshold.
WAITING = {
    ("selection.py", "select"),
    ("selection.py", "_rows_of"),
    ("eager.py", "_order"),
}
PREFILLS = {("worker_base.py", "_encode")}  # of SGLang's
EXPECTED = PREFILLS | EMULATED | ON_THE_HOST | WAITING


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS or _has_mask(func, args):
            note(str(func))
        return func(*args, **(kwargs or {}))


def _has_mask(func, args):
    """Return whether tensors are indexed by booleans; a single value is filled in without counting them."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        return False
    if func is not aten.index.Tensor and args[2].numel() == 1:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def note(what):
    """Log where values are read, unless that is expected."""
    frames = [frame for frame in traceback.extract_stack()[:-2] if not frame.filename.endswith("waits.py")]
    names = [(frame.filename.rpartition("/")[2], frame.name) for frame in frames]
    if any(name in EXPECTED or (name[0], None) in EXPECTED for name in names):
        return
    last = next(frame for frame in reversed(frames) if "/torch/" not in frame.filename)
    logger.warning("reads values: %s in %s, %s:%d", what, last.name, last.filename, last.lineno)


@contextmanager
def watching():
    """Report what is read inside the block."""
    plain = {name: getattr(torch.Tensor, name) for name in METHODS}

    def noting(name):
        def method(self, *args, **kwargs):
            note(name)
            return plain[name](self, *args, **kwargs)

        return method

    for name in METHODS:
        setattr(torch.Tensor, name, noting(name))
    try:
        with _Watch():
            yield
    finally:
        for name, method in plain.items():
            setattr(torch.Tensor, name, method)
