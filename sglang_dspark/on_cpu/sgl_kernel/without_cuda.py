"""The module ``torch`` as SGLang's Qwen3-Next sees it: asked for the current device, it names the CPU.

A build of torch that knows CUDA would look for a GPU.
"""

from types import ModuleType
from typing import Any

import torch as whole


class _Torch(ModuleType):
    """Answers what ``torch`` does, but for the device of which nothing is said."""

    def __getattr__(self, name: str) -> Any:
        return getattr(whole, name)

    def get_device_module(self, device: str = "cpu") -> Any:
        """Return the module of a device."""
        return whole.get_device_module(device)


torch = _Torch("torch")
