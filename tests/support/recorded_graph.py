"""A CUDA graph without a GPU: what was launched is launched again, and no line of Python between the launches runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

T = TypeVar("T")

aten = torch.ops.aten
MEMORY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default}


class RecordedGraph(Generic[T]):
    """Records a function, and replays its operations and interpreted kernels on the tensors that they had.

    Attributes:
        output: what the function returned; every replay overwrites its tensors.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._tape: list[Callable[[], None]] = []
        launch = InterpretedFunction.run

        def launch_recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            operations.stopped = True
            launch(kernel, *args, **kwargs)
            operations.stopped = False
            self._tape.append(partial(launch, kernel, *args, **kwargs))

        with pytest.MonkeyPatch.context() as patch, _Operations(self._tape) as operations:
            patch.setattr(InterpretedFunction, "run", launch_recorded)
            self.output = run()

    def replay(self) -> T:
        """Run the operations and kernels again."""
        for launch in self._tape:
            launch()
        return self.output


class _Operations(TorchDispatchMode):
    """Records operations of torch, unless ``stopped``, as inside of a kernel."""

    def __init__(self, tape: list[Callable[[], None]]) -> None:
        super().__init__()
        self._tape, self.stopped = tape, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.stopped and func not in MEMORY:
            self._tape.append(partial(_again, partial(func, *args, **(kwargs or {})), result))
        return result


def _again(run: Callable[[], Any], result: Any) -> None:
    """Write what an operation returns now to where it has written first."""
    for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
