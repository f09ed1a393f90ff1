"""Makes a server log every wait for the device in a decode step.

Python imports this module at start-up when its folder is on ``PYTHONPATH``.
"""

import importlib.abc
import importlib.util
import logging
import sys
import warnings

WORKER = "sglang_dspark.worker.worker"
logger = logging.getLogger(__name__)


class WorkerFinder(importlib.abc.MetaPathFinder):
    """Patches the worker's module right after it was loaded."""

    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            watch(module.DSparkWorker)

        spec.loader.exec_module = exec_module
        return spec


def watch(worker):
    """Let PyTorch warn of synchronising calls inside ``decode``, and write the warnings to the log."""
    import torch

    def decode(self, batch, publish, original=worker.decode):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return original(self, batch, publish)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                for warning in caught:
                    if "synchroniz" in str(warning.message):
                        logger.warning("waits for the device: %s:%d", warning.filename, warning.lineno)

    worker.decode = decode


sys.meta_path.insert(0, WorkerFinder())
