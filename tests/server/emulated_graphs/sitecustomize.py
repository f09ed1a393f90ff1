"""Runs the CUDA-graph path of the worker in a CPU server: graphs are functions called again, kernels are interpreted.

Python imports this module at start-up when its folder is on ``PYTHONPATH``. What is exercised is real: staging into
tiers, padding, plans laid out on the device, buffers that a replay overwrites. What is not: capture itself.
"""

import importlib.abc
import importlib.util
import sys
from contextlib import contextmanager

WORKER = "sglang_dspark.worker.worker"
REQUEST_SLOTS = [1, 2]


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
            emulate(module)

        spec.loader.exec_module = exec_module
        return spec


class Emulated:
    """Stands for ``engine.graphs.Captured``."""

    def __init__(self, run):
        self._run, self.output = run, run()

    def replay(self):
        overwrite(self.output, self._run())
        return self.output


def overwrite(old, new):
    """Copy the tensors of ``new`` to where those of ``old`` are, as a replay writes to fixed addresses."""
    import torch

    if isinstance(new, torch.Tensor):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    elif isinstance(new, tuple):
        for was, now in zip(old, new, strict=True):
            overwrite(was, now)
    elif hasattr(new, "__dict__"):
        for name, value in vars(new).items():
            overwrite(getattr(old, name), value)


def emulate(module):
    """Make the worker of a CPU server believe in graphs."""
    import torch
    from waits import watching

    from sglang_dspark.engine.cpu_attention import CpuVerifyBackend
    from sglang_dspark.worker import step_graphs

    def decode(self, batch, publish, original=module.DSparkWorker.decode):
        with watching():
            return original(self, batch, publish)

    @contextmanager
    def capturing(runner):
        yield Emulated

    def initialise(self, original=module.DSparkWorker.__init__, **kwargs):
        original(self, **kwargs)
        self.on_gpu = self.drafter.on_gpu = True

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, original=CpuVerifyBackend.forward_extend):
        layout = batch.spec_info
        if not batch.forward_mode.is_target_verify() or layout.groups:
            return original(self, q, k, v, layer, batch, save_kv_cache)
        return ragged_attention(self, q, k, v, layer, batch)

    step_graphs.capturing = capturing
    torch.cuda.mem_get_info = lambda: (0, 0)
    module.DSparkWorker.__init__ = initialise
    module.DSparkWorker.decode = decode
    module.graph_request_slots = lambda runner: REQUEST_SLOTS
    CpuVerifyBackend.forward_extend = forward_extend
    module.load_or_measure = step_times


def step_times(worker):
    """A table under which speculation pays: to measure interpreted kernels takes half a minute and says nothing."""
    import numpy as np

    from sglang_dspark.prefix_scheduler.sps_table import SpsTable

    drafts = np.arange(worker.max_verify + 1)
    return SpsTable(
        key={},
        requests=REQUEST_SLOTS,
        drafts=drafts.tolist(),
        contexts=[16],
        draft_ms=np.tile((drafts > 0)[None, :, None], (len(REQUEST_SLOTS), 1, 1)).astype(float),
        verify_ms=(20.0 + np.outer(REQUEST_SLOTS, 1 + drafts))[:, :, None],
        tiers=list(worker.graphs.tiers.tokens),
    )


def ragged_attention(backend, q, k, v, layer, batch):
    """What the CUDA backend does with verification rows, on the CPU backend's pools."""
    from dspark_kernels.window_attention import window_attention
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, layout = backend.token_to_kv_pool, batch.spec_info
    k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    # Rows of padding write to slot 0, NaN from the second layer on. A GPU's kernels mask what they read of it; steps
    # that run launch by launch are attended by the CPU's gather here, which does not have to expect that.
    for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)):
        buffer[0] = 0
    attended = window_attention(
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k,
        v,
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        backend.req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        layout.indptr,
        width=layout.draft_token_num,
        causal=True,
        scale=layer.scaling,
        splits=2,
    )
    # On a GPU the rows of padding hold what lay in their memory: the worst that this can be.
    attended[int(layout.indptr[-1]) :] = float("nan")
    return attended.view(q.shape)


sys.meta_path.insert(0, WorkerFinder())
