"""Functions that are called again where a GPU would replay a graph: results go to where the first ones lie."""

import faults
import torch
from launches import one


class Emulated:
    """Stands for ``engine.graphs.Captured``."""

    def __init__(self, run):
        self._run, self.output = run, run()

    def replay(self):
        with one("graph"):
            new = self._run()
            if not faults.planted(faults.GRAPH):
                overwrite(self.output, new)
        return self.output

    def launched(self):
        return self._run()


def overwrite(old, new):
    """Copy the tensors of ``new`` to where those of ``old`` are, as a replay writes to fixed addresses."""
    if isinstance(new, torch.Tensor):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    elif isinstance(new, tuple):
        for was, now in zip(old, new, strict=True):
            overwrite(was, now)
    elif hasattr(new, "__dict__"):
        for name, value in vars(new).items():
            overwrite(getattr(old, name), value)
