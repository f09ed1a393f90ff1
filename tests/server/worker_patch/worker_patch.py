"""Lets a ``sitecustomize`` module change the worker of the server that it is started with."""

import importlib.abc
import importlib.util
import sys

WORKER = "sglang_dspark.worker.worker"


class WorkerFinder(importlib.abc.MetaPathFinder):
    """Calls ``patch`` with the worker's module right after it was loaded."""

    def __init__(self, patch):
        self._patch = patch

    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._patch(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_worker(patch):
    """Have ``patch`` called with the worker's module as soon as it is imported."""
    sys.meta_path.insert(0, WorkerFinder(patch))
