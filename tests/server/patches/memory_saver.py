"""A stand-in for torch_memory_saver, which knows only CUDA, on a server with ``--enable-memory-saver``.

What a region allocates is overwritten at a pause, as memory is that was away. With a copy on the host it comes back.
"""

import contextlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(values):
    """The memory of tensors, by address."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.numel()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


class Region(TorchDispatchMode):
    """Notes what operations allocate."""

    def __init__(self, allocated):
        super().__init__()
        self._allocated = allocated

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        self._allocated.update({place: memory for place, memory in storages(made).items() if place not in given})
        return made


class MemorySaver:
    """Regions by tag."""

    enabled = True

    def __init__(self):
        self.regions = {}
        self._copies = {}

    @contextlib.contextmanager
    def region(self, tag, enable_cpu_backup=False):
        with Region(self.regions.setdefault((tag, enable_cpu_backup), {})):
            yield

    def pause(self, tag):
        for is_kept in (True, False):
            for memory in self.regions.get((tag, is_kept), {}).values():
                if is_kept:
                    self._copies[tag, memory.data_ptr()] = memory.clone()
                memory.fill_(0xFF)  # no number

    def resume(self, tag):
        for (kept_tag, place), copy in list(self._copies.items()):
            if kept_tag == tag:
                self.regions[tag, True][place].copy_(copy)
                del self._copies[kept_tag, place]


@contextlib.contextmanager
def configure_subprocess():
    yield


def install(module):
    """Have SGLang's adapter take the stand-in on a machine without a GPU, and wait for the CPU when all is done."""
    if not torch.cuda.is_available():
        module.torch_memory_saver, module._memory_saver = sys.modules[__name__], MemorySaver()
        device_module = torch.get_device_module
        torch.get_device_module = lambda device=None: device_module(device or "cpu")
