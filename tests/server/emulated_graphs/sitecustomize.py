"""Runs the CUDA-graph path of the worker in a CPU server: graphs are functions called again, kernels are interpreted.

Python imports this module at start-up when its folder is on ``PYTHONPATH``. What is exercised is real: staging into
tiers, padding, plans laid out on the device, buffers that a replay overwrites. What is not: capture itself.
"""

import sys
from contextlib import contextmanager, nullcontext

from worker_patch import patch_worker

REQUEST_SLOTS = [1, 2]
PROCESSORS = 2  # so few that the contexts of one request are split, and those of two are not


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
    import forms
    import torch
    from waits import watching

    from sglang_dspark.engine.forward.cpu_attention import CpuVerifyBackend
    from sglang_dspark.worker import graph_stages, verify_plan

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
        if not batch.forward_mode.is_target_verify():
            return original(self, q, k, v, layer, batch, save_kv_cache)
        return ragged_attention(self, q, k, v, layer, batch)

    def warm_up(*args, original=module.warm_up):
        original(*args)
        forms.end_of_warm_up()

    # On a GPU, kernels tell apart batches beyond 16 and 32 requests; here, the few that tests have.
    sys.modules["dspark_kernels.markov_walk"]._MIN_DOT = 1
    sys.modules["dspark_kernels.plan"]._MIN_BLOCK_R = sys.modules["dspark_kernels.plan"]._MIN_BLOCK_J = 1
    forms.watch()
    note_draft_kernels()
    module.warm_up = warm_up
    # Steps that run launch by launch are planned and attended as on a GPU, too.
    verify_plan._on_host = lambda tokens: False
    graph_stages.capturing = capturing
    torch.cuda.mem_get_info = lambda: (0, 0)
    module.DSparkWorker.__init__ = initialise
    module.DSparkWorker.decode = decode
    module.graph_request_slots = lambda runner: REQUEST_SLOTS
    CpuVerifyBackend.forward_extend = forward_extend
    module.load_or_measure = step_times


def note_draft_kernels():
    """Take note of the drafter's launches on a GPU where its torch form computes here."""
    import forms
    import torch
    from dspark_kernels.kv_inject import kv_inject
    from dspark_kernels.window_attention import num_splits, window_attention

    from sglang_dspark.draft import cache, model
    from sglang_dspark.worker import drafter

    def block_attend(pool, step, gamma, config, original=drafter.block_attend):
        attend = original(pool, step, gamma, config)
        indptr = torch.arange(0, (len(step) + 1) * gamma, gamma)
        table = step.req_to_token, step.req_pool_indices, step.prefix_lens, indptr
        how = {"width": gamma, "causal": False, "scale": config.head_dim**-0.5}
        splits = num_splits(len(step), config.num_key_value_heads, PROCESSORS)
        attend.on_gpu = lambda layer, q, k, v: window_attention(
            q, k, v, pool.k[layer], pool.v[layer], *table, splits=splits, **how
        )
        return attend

    def forward_block(self, embeds, positions, attend, original=model.DraftModel.forward_block):
        with forms.noted_only():
            self.forward_block_fused(embeds, positions, attend.on_gpu)
        return original(self, embeds, positions, attend)

    def inject(*args, original=cache.kv_inject_ref):
        with forms.noted_only():
            kv_inject(*args)
        original(*args)

    drafter.block_attend = block_attend
    model.DraftModel.forward_block = forward_block
    cache.kv_inject_ref = inject


def step_times(staging, target_worker, server_args, max_verify):
    """A table under which speculation pays: to measure interpreted kernels takes half a minute and says nothing.

    A few of the steps to be measured are taken nevertheless: what they compile would count as their time.
    """
    import numpy as np
    import torch

    from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch
    from sglang_dspark.scheduling.sps_table import SpsTable
    from sglang_dspark.worker.startup.measure_steps import MeasuredSteps

    for requests in (1, 1 + REQUEST_SLOTS[-1]):
        with torch.no_grad(), DummyBatch(target_worker, requests, 16, max_verify + 1) as dummy:
            steps = MeasuredSteps(staging, dummy, max_verify)
            steps.draft(3)
            steps.verify(3)
    drafts = np.arange(max_verify + 1)
    return SpsTable(
        key={},
        requests=REQUEST_SLOTS,
        drafts=drafts.tolist(),
        contexts=[16],
        draft_ms=np.tile((drafts > 0)[None, :, None], (len(REQUEST_SLOTS), 1, 1)).astype(float),
        verify_ms=(20.0 + np.outer(REQUEST_SLOTS, 1 + drafts))[:, :, None],
        tiers=list(staging.graphs.tiers.tokens),
    )


def ragged_attention(backend, q, k, v, layer, batch):
    """What the CUDA backend does with verification rows, on the CPU backend's pools."""
    import forms
    from dspark_kernels.window_attention import num_splits, window_attention, window_attention_ref
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, layout = backend.token_to_kv_pool, batch.spec_info
    k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    # Rows of padding write to slot 0, NaN from the second layer on. A GPU's kernels mask what they read of it; prompts
    # are attended by the CPU's gather here, which does not have to expect that.
    for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)):
        buffer[0] = 0
    rows = (
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k,
        v,
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        backend.req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        layout.indptr,
    )
    how = {"causal": True, "scale": layer.scaling}
    splits = num_splits(-(-len(q) // layout.draft_token_num), layer.tp_k_head_num, PROCESSORS)
    with forms.noted_only() if forms.warming_up() else nullcontext():
        attended = window_attention(*rows, width=layout.draft_token_num, splits=splits, **how)
    if forms.warming_up():  # an interpreted kernel takes a hundred times as long
        return window_attention_ref(*rows, **how).view(q.shape)
    # On a GPU the rows of padding hold what lay in their memory: the worst that this can be.
    attended[int(layout.indptr[-1]) :] = float("nan")
    return attended.view(q.shape)


patch_worker(emulate)
