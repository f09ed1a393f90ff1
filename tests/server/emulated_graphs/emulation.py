"""Runs the CUDA-graph path of the worker in a CPU server: graphs are functions called again, kernels are interpreted.

What is exercised is real: staging into tiers, padding, plans laid out on the device, buffers that a replay overwrites.
What is not: capture itself.
"""

import functools
import itertools
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from patching import interpret_adapters, late, patch_worker

REQUEST_SLOTS = [1, 2]
FOREVER = ExitStack()  # a context without a reference ends at once

_interpreted = {}  # the pool of the layer whose attention is interpreted, by the layer's window


def emulate(module):
    """Make the worker of a CPU server believe in graphs."""
    import forms
    import interpreting
    import torch
    from dspark_kernels import kernels_anywhere, plans
    from dspark_kernels.drafting import walk
    from launches import counting
    from replays import Emulated
    from waits import watching

    from sglang_dspark.engine import verify
    from sglang_dspark.worker import graphs

    def decode(self, batch, publish, extra=None, original=module.DSparkWorker.decode):
        forms.start_serving()
        kind = "of" if extra is None else "next to prompts of"
        with counting(f"a step {kind} {len(batch.reqs)} by {self.schedule.policy.name}"), watching():
            return original(self, batch, publish, extra)

    @contextmanager
    def capturing(runner):
        yield Emulated

    def initialise(self, original=module.DSparkWorker.__init__, **kwargs):
        original(self, **kwargs)
        self.on_gpu = True

    def warm_up(*args, original=module.warm_up):
        original(*args)
        forms.end_of_warm_up()

    graphs.Tiers.of = few_tiers(graphs.Tiers.of)
    # On a GPU, kernels tell apart batches beyond 16 and 32 requests; here, the few that tests have.
    walk._MIN_DOT = plans._MIN_BLOCK_R = plans._MIN_BLOCK_J = 1
    interpreting.patch_once_per_launch()
    forms.watch()
    FOREVER.enter_context(kernels_anywhere())
    note_draft_kernels()
    note_state_kernels()
    module.warm_up = warm_up
    graphs.capturing = capturing
    torch.cuda.mem_get_info = lambda: (0, 0)
    module.DSparkWorker.__init__ = initialise
    module.PackedCopies, module.DSparkWorker.decode = ring_of_the_host, decode
    module.graph_request_slots, module.DSparkWorker._prefill = lambda runner: REQUEST_SLOTS, prefill
    module.DSparkWorker.step_times = step_times
    verify.window_attention = noted_attention
    verify.CpuBackend._fixed_split, verify.CpuBackend._splits = (64, 8) if "FIXED_TILES" in os.environ else (None, None)
    verify.CpuBackend._attend = verifying(verify.CudaVerifyBackend._attend, verify.CpuBackend._attend)


def verifying(as_on_a_gpu, of_prompts):
    """Return attention of verification as on a GPU; prompts have SGLang's own there."""

    def attend(self, rows, forward_batch):
        verifies = forward_batch.forward_mode.is_target_verify()
        return (as_on_a_gpu if verifies else of_prompts)(self, rows, forward_batch)

    return attend


def prefill(self, batch, publish):
    """Count what a prefill launches; what SGLang's own reads is not looked at."""
    from launches import counting
    from waits import watching

    with counting(f"a prefill of {batch.extend_num_tokens} rows"), watching():
        return super(type(self), self)._prefill(batch, publish)


def few_tiers(original):
    """Return what makes three sizes of verification at most."""

    def of(requests, max_verify):
        tiers = original(requests, max_verify)
        most = max(tiers.tokens)
        return replace(tiers, tokens=tuple(sorted({2, min(8, most), most})))

    return of


def watch_order():
    """Have streams of the worker's process watched."""

    def watch(module):
        import order

        order.watch(module.DSparkWorker)

    patch_worker(watch)


def ring_of_the_host(words, device):
    """Make copies that stay on the host for as long as on a GPU, and no longer."""
    import torch

    from sglang_dspark.step import packed

    copies = packed.PackedCopies(words, device)
    rings = [torch.full((2, words), -1, dtype=packed.WORD).unbind() for _ in range(packed._DEPTH)]
    copies._turns = itertools.cycle(rings)
    return copies


def note_draft_kernels():
    """Note the drafter's launches and compute its torch forms: interpreted, its kernels take too long.

    The kernels themselves draft blocks, except before the first request, when no block is read.
    """
    import forms
    import torch
    from dspark_kernels import add_norm, block_convolution, draft_block, kv_inject, qk_norm_rope, silu_mul

    from sglang_dspark.worker.draft_attention import block_attention

    def drafted(*args, on_gpu=draft_block.kernel, **kwargs):
        if forms.serving() or forms.checking():
            return on_gpu(*args, **kwargs)
        # Zeros, because gated heads and selectors look tokens up that no kernel has written.
        with forms.noted_only(), patch.object(torch, "empty", torch.zeros):
            return on_gpu(*args, **kwargs)

    def noted(function):
        launch = function.kernel

        def note(*args, **kwargs):
            if forms.checking():
                return launch(*args, **kwargs)
            with forms.noted_only():
                launch(*args, **kwargs)
            return function.reference(*args, **kwargs)

        function.kernel = functools.update_wrapper(note, launch)

    def laid_out(*args, on_gpu=block_attention.kernel, **kwargs):
        launch, attend = on_gpu(*args, **kwargs), block_attention.reference(*args, **kwargs)

        def note(*rows):
            if forms.checking():
                return launch(*rows)
            with forms.noted_only():
                launch(*rows)
            return attend(*rows)

        return note

    for function in (kv_inject, qk_norm_rope, silu_mul, add_norm, block_convolution):
        noted(function)
    block_attention.kernel = functools.update_wrapper(laid_out, block_attention.kernel)
    draft_block.kernel = functools.update_wrapper(drafted, draft_block.kernel)


def note_state_kernels():
    """Note the launches of recurrent layers, and compute their torch forms until there is a request."""
    import forms
    from dspark_kernels import causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta

    def noted(function):
        on_gpu = function.kernel

        def run(*args, **kwargs):
            if forms.serving() or forms.checking():
                return on_gpu(*args, **kwargs)
            with forms.noted_only():
                on_gpu(*args, **kwargs)
            return function.reference(*args, **kwargs)

        function.kernel = functools.update_wrapper(run, on_gpu)

    for function in (causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta):
        noted(function)


def step_times(self):
    """Return a table under which speculation pays: measuring interpreted kernels takes half a minute and says nothing.

    A few of the steps to be measured run nevertheless: the forms that they compile belong to the start.
    """
    import numpy as np
    import torch

    from sglang_dspark.engine.measure_steps import DummyBatch
    from sglang_dspark.scheduling.sps_table import SpsTable
    from sglang_dspark.worker.warm_up import MeasuredSteps

    for requests in (1, 1 + REQUEST_SLOTS[-1]):
        with torch.no_grad(), DummyBatch(self.target_worker, requests, 16, self.max_verify + 1) as dummy:
            steps = MeasuredSteps(self.executors, dummy, self.max_verify)
            steps.draft(3)
            steps.verify(3)
    drafts = np.arange(self.max_verify + 1)
    return SpsTable(
        key={},
        requests=REQUEST_SLOTS,
        drafts=drafts.tolist(),
        contexts=[16],
        draft_ms=np.tile((drafts > 0)[None, :, None], (len(REQUEST_SLOTS), 1, 1)).astype(float),
        verify_ms=(20.0 + np.outer(REQUEST_SLOTS, 1 + drafts))[:, :, None],
        tiers=list(self.executors.captured.tiers.tokens),
    )


def noted_attention(queries, kv, pools, windows, **how):
    """Attend over verification rows, in one layer of each kind by the kernel.

    Interpreted, it takes a hundred times as long as its reference.
    """
    import forms
    from dspark_kernels import window_attention

    interpreted = _interpreted.setdefault(windows.sliding_window, pools[0].data_ptr()) == pools[0].data_ptr()
    if interpreted and not forms.warming_up():
        return window_attention(queries, kv, pools, windows, **how)
    with forms.noted_only():
        window_attention(queries, kv, pools, windows, **how)
    return window_attention.reference(queries, kv, pools, windows, **how)


def install():
    """Emulate the graphs of this process, whose kernels were decorated to be interpreted."""
    patch_worker(emulate)
    patch_worker(late("stale", "spoil"))
    if "CHECK_ORDER" in os.environ:
        watch_order()
    interpret_adapters()
