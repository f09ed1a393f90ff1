"""Reports what streams of a CPU server would do to the same memory in no order, if they were a GPU's.

SGLang runs on a CPU what it runs on a GPU: it selects streams, has them wait for each other, and records events. There
these are empty. Here a stream has a vector clock (Lamport; Mattern): what is before whatever it is given next. Every
launch reads and writes ranges of memory at a time of its stream; two that touch the same bytes, one of them writing,
have to be ordered by waits. The host is one more stream, that of its reads. Memory that is given back is its stream's
again at once: what others do with it has to be before that stream's next launch, or recorded for it.

Known limits: a kernel's writes are found by their effect, so one that writes what is there already is not seen; a copy
between host and device is none on a CPU, so both sides are one memory; what was there before the watch, or is made
by a kernel's interpreter, has no stream that it goes back to.
"""

import logging
import traceback
import weakref
from collections import defaultdict
from contextlib import contextmanager
from itertools import count

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

_numbers = count()
_state = {"current": None, "inside": False, "watching": False}


class Stream:
    """Runs work in order, after all that it was told to wait for."""

    def __init__(self, *_, **__):
        self.number = next(_numbers)
        self.clock = defaultdict(int)

    def wait_stream(self, stream):
        join(self.clock, stream.clock)

    def wait_event(self, event):
        join(self.clock, event.clock)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        join(HOST.clock, self.clock)

    def query(self):
        return True


class Event:
    """A moment of a stream."""

    def __init__(self, *_, **__):
        self.clock = {}

    def record(self, stream=None):
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        join(HOST.clock, self.clock)

    def query(self):
        """Say that the moment has passed, which the host then knows."""
        self.synchronize()
        return True

    def elapsed_time(self, end):
        return 0.0


class StreamContext:
    """Gives a stream what is launched inside."""

    def __init__(self, stream):
        self.stream, self.before = stream, []

    def __enter__(self):
        self.before.append(_state["current"])
        _state["current"] = self.stream or _state["current"]
        return self.stream

    def __exit__(self, *_):
        _state["current"] = self.before.pop()


HOST, DEFAULT = Stream(), Stream()
_state["current"] = DEFAULT


def current_stream(device=None):
    return _state["current"]


def join(clock, other):
    """Have ``clock`` know what ``other`` knows."""
    for number, time in other.items():
        clock[number] = max(clock[number], time)


# ---- memory


class Touched:
    """The last reads and writes of one memory.

    Attributes:
        touches: (first byte, byte after the last one, stream, its time) by whether it was a write, and the place.
        owner: stream that it was allocated on; None if that is not known.
        recorded: numbers of streams that the allocator waits for, by ``record_stream``.
    """

    def __init__(self, owner):
        self.touches, self.owner, self.recorded = {True: {}, False: {}}, owner, {HOST.number}

    def touch(self, span, writes, stream, where):
        """Note a touch, and report the earlier ones that it is in no order with."""
        low, high = span
        for kind in (True, False) if writes else (True,):
            for key, earlier in list(self.touches[kind].items()):
                first, last, number, time, _ = earlier
                if first >= high or last <= low:
                    continue
                if stream.clock[number] < time:
                    report(earlier, KINDS[kind], KINDS[writes], stream, where)
                elif writes and low <= first and last <= high:
                    del self.touches[kind][key]  # whatever comes later is after the new write or unordered with it
        self.touches[writes][low, high, stream.number] = (low, high, stream.number, stream.clock[stream.number], where)

    def free(self):
        """Report touches that the next launch of its stream, which may have the memory, is in no order with."""
        if self.owner is None:
            return
        join(self.owner.clock, HOST.clock)
        for kind, touches in self.touches.items():
            for earlier in touches.values():
                *_, number, time, _ = earlier
                if number not in self.recorded and self.owner.clock[number] < time:
                    report(earlier, KINDS[kind], "free", self.owner, place())


KINDS = {True: "write", False: "read"}
_memory = {}
_reported = set()


def touched(storage, owner=None):
    """Return what is known of a tensor's memory, for as long as it lives; new one is of the stream ``owner``."""
    key = storage._cdata
    if key not in _memory:
        _memory[key] = Touched(owner)
        weakref.finalize(storage, lambda: _memory.pop(key).free()).atexit = False
    return _memory[key]


def record_stream(tensor, stream):
    touched(tensor.untyped_storage()).recorded.add(stream.number)


def span_of(tensor):
    """Return the first byte of a tensor in its memory, and the one after its last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first * tensor.element_size(), last * tensor.element_size()


def touch(tensor, writes, stream, owner=None):
    """Note that a stream reads or writes a tensor now."""
    if tensor.numel() and tensor.layout is torch.strided and tensor.device.type == "cpu":
        touched(tensor.untyped_storage(), owner).touch(span_of(tensor), writes, stream, place())


def place():
    """Return the innermost functions of ours and SGLang's."""
    frames = traceback.walk_stack(None)
    names = (
        f"{frame.f_code.co_filename.rpartition('/')[2]}:{line} {frame.f_code.co_name}"
        for frame, line in frames
        if "sglang" in frame.f_code.co_filename or "dspark_kernels" in frame.f_code.co_filename
    )
    return " < ".join(name for name, _ in zip(names, range(3), strict=False))


def report(earlier, was, now, stream, where):
    """Log two touches in no order, once for each pair of places."""
    *_, number, _, before = earlier
    kinds = f"{was} and {now}"
    if (before, where, kinds) not in _reported:
        _reported.add((before, where, kinds))
        logger.warning("in no order: %s by streams %d and %d: [%s], [%s]", kinds, number, stream.number, before, where)


# ---- launches


def launch(reads, writes, results=()):
    """Note what one launch of the current stream reads and writes; the host knows all that it has waited for.

    Memory of ``results`` that is new was allocated on this stream.
    """
    stream = current_stream()
    join(stream.clock, HOST.clock)
    stream.clock[stream.number] += 1
    for tensor in reads:
        touch(tensor, False, stream)
    for tensor in writes:
        touch(tensor, True, stream)
    for tensor in results:
        touch(tensor, True, stream, owner=stream)


class Launches(TorchDispatchMode):
    """Notes every operation of torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _state["inside"] or func.is_view:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            read_by_host(args[0])
            return result
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = {
            argument.name
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        reads = [leaf for name, value in named.items() if name not in written for leaf in tensors_of(value)]
        writes = [leaf for name in written for leaf in tensors_of(named.get(name))]
        launch(reads, writes, tensors_of(result))
        return result


def tensors_of(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextmanager
def kernel(arguments):
    """Note one interpreted kernel, which writes what it changes."""
    if _state["inside"] or not _state["watching"]:
        yield
        return
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    with _disable_current_modes():
        before = [tensor.clone() for tensor in tensors]
    _state["inside"] = True
    try:
        yield
    finally:
        _state["inside"] = False
    with _disable_current_modes():
        changed = [tensor for tensor, was in zip(tensors, before, strict=True) if not torch.equal(tensor, was)]
    launch(tensors, changed)


def read_by_host(tensor):
    """Note that the host reads a value: of a GPU's memory, after all that its current stream was given."""
    join(HOST.clock, current_stream().clock)
    touch(tensor, False, HOST)


def watch(worker):
    """Replace the empty streams of a CPU, and watch what a worker of this class launches after its start."""
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
    }.items():
        setattr(torch.cpu, name, value)
    torch.Tensor.record_stream = record_stream

    def init_cuda_graphs(self, original=worker.init_cuda_graphs):
        original(self)  # capturing waits for the device
        _state["watching"] = True
        Launches().__enter__()
        logger.warning("streams are watched")

    worker.init_cuda_graphs = init_cuda_graphs
