"""Ragged rows of recurrent layers with random inputs, and requests that are served by them step by step."""

from dataclasses import replace

import torch
from dspark_kernels import DeltaGates, DeltaInputs, ReplayedRows, StateRows


class Rows:
    """Makes what recurrent layers take, from one stream of random numbers.

    Args:
        device: of all tensors.
        dtype: of what rows bring.
    """

    def __init__(self, device, dtype=torch.float32, seed=0):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def rand(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self._generator).to(dtype or self.dtype).to(self.device)

    def ints(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def state_rows(self, lens, slots, dtype=torch.int64):
        indptr = [sum(lens[:i]) for i in range(len(lens) + 1)]
        return StateRows(self.ints(indptr, dtype), self.ints(slots, dtype))

    def delta(self, num_rows, heads, dims, layers=()):
        """q, inputs and gates of ``num_rows`` rows; ``heads`` are H and HV, ``dims`` K and V, ``layers`` (L,) or ()."""
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        numbers = (self.rand(*layers, num_rows, value_heads) for _ in range(2))
        inputs = DeltaInputs(
            self.rand(*layers, num_rows, key_heads, key_dim),
            self.rand(*layers, num_rows, value_heads, value_dim),
            *numbers,
        )
        gates = DeltaGates(*(self.rand(*layers, value_heads, dtype=torch.float32) for _ in range(2)))
        return self.rand(*layers, num_rows, key_heads, key_dim), inputs, gates

    def conv(self, num_rows, channels, width=4, bias=True, layers=()):
        """Inputs, weight and bias of a convolution."""
        x = self.rand(*layers, num_rows, channels)
        return x, self.rand(channels, width), self.rand(channels) if bias else None


def replayed(rows, lengths, tracks=None, dtype=torch.int64):
    """``rows`` of which ``lengths`` are replayed; ``tracks`` are track lengths and slots."""

    def ints(values):
        return torch.tensor(values, dtype=dtype, device=rows.slots.device)

    return ReplayedRows(rows.indptr, rows.slots, ints(lengths), *(map(ints, tracks) if tracks else ()))


def part(inputs, index):
    """Rows (or layers) of inputs or gates."""
    return replace(inputs, **{name: value[index] for name, value in vars(inputs).items()})


def served(num_steps, num_requests, most_rows, seed=0):
    """Yield steps of a server: the requests of the batch in the order of their rows, how many, and how many accepted.

    Requests are absent at times, and no step has the order of the one before.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        order = torch.randperm(num_requests, generator=generator).tolist()
        present = order[: int(torch.randint(1, num_requests + 1, (), generator=generator))]
        lens = torch.randint(1, most_rows + 1, (len(present),), generator=generator).tolist()
        yield present, lens, [int(torch.randint(1, length + 1, (), generator=generator)) for length in lens]
