"""SGLang's hierarchical cache on a CPU: its streams, events and copies, which are CUDA's.

Copies happen when a stream waits for them, and not before: a forward that does not wait finds what lay in its slots.
"""

from contextlib import contextmanager

import torch

_state = {"stream": None}


class Stream:
    """Work that was launched and has not happened yet."""

    def __init__(self):
        self.work, self.done, self.launched = [], 0, 0

    def launch(self, function):
        self.launched += 1
        self.work.append(function)

    def run_to(self, number):
        while self.done < number:
            self.done += 1
            self.work.pop(0)()

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        """Do nothing: a CPU has computed a result as soon as it was launched."""


class Event:
    """A moment of a stream, which has come when it is asked for."""

    def __init__(self, enable_timing=False):
        self.stream, self.number = None, 0

    def record(self, stream=None):
        self.stream = stream or current_stream()
        self.number = self.stream.launched

    def wait(self, stream=None):
        self.synchronize()

    def query(self):
        self.synchronize()
        return True

    def elapsed_time(self, end):
        return 0.0

    def synchronize(self):
        if self.stream is not None:
            self.stream.run_to(self.number)


MAIN = Stream()


def current_stream():
    return _state["stream"] or MAIN


@contextmanager
def stream(other):
    before, _state["stream"] = _state["stream"], other
    try:
        yield
    finally:
        _state["stream"] = before


def synchronize():
    pass


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Launch SGLang's copy of slots between lists of layers."""

    def copy():
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    current_stream().launch(copy)


def allocate(dims, dtype, device, **_how):
    """Return memory of the host, which is not pinned."""
    return torch.empty(dims, dtype=dtype, device=device)


def install_pools(module):
    """Complete SGLang's module of host pools."""
    if not torch.cuda.is_available():
        module.transfer_kv_direct = transfer_kv_direct
        module.ALLOC_MEMORY_FUNCS["cpu"] = allocate
        from sglang.srt.mem_cache.pool_host import base

        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # ten gigabytes, of which tests need none


def install_streams(module):
    """Complete a module of SGLang's that moves K/V, or waits for it."""
    if not torch.cuda.is_available():
        import host_memory

        module.device_module = host_memory
