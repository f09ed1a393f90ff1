"""Stand in for SGLang's kernel package, which is built for CUDA alone, where there is no GPU.

SGLang imports its names ending in ``_cpu`` as soon as it starts on a CPU. Servers with DSPARK call those that are
defined here; the others belong to other speculative algorithms. Layers with a gated delta net are computed in plain
torch: sums, states and gates are float32.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import mamba, operators

__version__ = "0"

for _module in (mamba, operators):
    for _name, _function in vars(_module).items():
        if _name.endswith("_cpu"):
            setattr(torch.ops.sgl_kernel, _name, _function)


def assign_req_to_token_pool_cpu(
    rows: Any, req_to_token: Any, begins: Any, ends: Any, slots: Any, num_columns: int
) -> None:
    """Write ``slots`` [n] to the columns ``begins[i]..ends[i]-1`` of row ``rows[i]``, one request behind the other."""
    lengths = (ends - begins).tolist()
    for row, begin, part in zip(rows.tolist(), begins.tolist(), slots.split(lengths), strict=True):
        req_to_token[row, begin : begin + len(part)] = part


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU; serve what needs it on a GPU")

    return absent
