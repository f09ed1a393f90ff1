"""Describes a checkpoint whose tensors are not plain floating-point numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """The form of a quantised checkpoint.

    Attributes:
        words: the method, for people.
        methods: what SGLang calls it, in ``--speculative-draft-model-quantization``.
        num_quantised: weights in this form.
        num_bytes: of all tensors in the files.
    """

    words: str
    methods: frozenset[str]
    num_quantised: int
    num_bytes: int

    def dequantised(self, parameters: Iterable[Tensor]) -> str:
        """Say what loading has made of it; ``parameters`` are those of the loaded model."""
        loaded = list(parameters)
        dtype = str(max(loaded, key=Tensor.numel).dtype).removeprefix("torch.")
        size = sum(parameter.numel() * parameter.element_size() for parameter in loaded)
        return (
            f"{self.num_quantised} weights stored as {self.words}, dequantised to {dtype}: "
            f"{self.num_bytes / 2**20:,.1f} MiB in the files, {size / 2**20:,.1f} MiB loaded"
        )
