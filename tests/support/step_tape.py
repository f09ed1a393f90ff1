"""Chrome traces of decode steps, made by hand."""

import gzip
import json

from tracing.chrome import gpu_activities
from tracing.summary import summarise

# (name, microseconds) in the order in which they run; one graph launch per list.
DRAFT = [
    *[("embed", 2), ("gemm", 30), ("_window_attention_kernel", 8), ("lm_head", 60), ("choose_kernel", 5)],
    *[("latent", 1), ("choose_kernel", 6), ("_block_confidence_kernel", 3), ("sigmoid", 1)],
]
VERIFY = [("_window_attention_kernel", 40), ("gemm", 160)]
ACCEPT = [("row_stats_kernel", 4), ("judge_kernel", 2), ("gemm", 7), ("_kv_inject_kernel", 3)]


class Tape:
    """A Chrome trace whose activities run one after the other, with 1 us between them."""

    def __init__(self):
        self.events, self.now_us, self.calls = [], 1000.0, 0

    def _call(self, name):
        self.calls += 1
        # The host is ahead of the GPU, and its events come in another order.
        event = {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1}
        self.events.insert(0, event | {"args": {"correlation": self.calls}})

    def _activity(self, name, us, category="kernel"):
        event = {"ph": "X", "cat": category, "name": name, "ts": self.now_us, "dur": us}
        self.events.append(event | {"args": {"correlation": self.calls, "stream": 7}})
        self.now_us += us + 1

    def graph(self, kernels):
        self._call("cudaGraphLaunch")
        for name, us in kernels:
            self._activity(name, us)

    def kernel(self, name, us):
        self._call("cuLaunchKernelEx")
        self._activity(name, us)

    def copy(self, us):
        self._call("cudaMemcpyAsync")
        self._activity("Memcpy DtoH (Device -> Pinned)", us, "gpu_memcpy")

    def step(self, draft=DRAFT, verify=VERIFY, accept=ACCEPT):
        self.kernel("_prepare_kernel", 1)
        self.graph(draft)
        self.kernel("_plan_kernel", 2)
        self.graph(verify)
        self.graph(accept)
        self.copy(3)
        self.kernel("index_put", 5)  # for the next step

    def joined_step(self):
        """The plan in the graph that drafts, and everything behind it in one more."""
        self.kernel("_prepare_kernel", 1)
        self.graph([*DRAFT, ("_plan_kernel", 2)])
        self.graph([*VERIFY, *ACCEPT])
        self.copy(3)
        self.kernel("index_put", 5)

    def parked_step(self):
        """Everything in one graph."""
        self.kernel("_prepare_kernel", 1)
        self.graph([("_plan_kernel", 2), *VERIFY, *ACCEPT])
        self.copy(3)
        self.kernel("index_put", 5)

    @property
    def document(self):
        return {"deviceProperties": [{"name": "Some GPU"}], "traceEvents": self.events}

    def summary(self):
        return summarise(gpu_activities(self.document))

    def save(self, path):
        path.write_bytes(gzip.compress(json.dumps(self.document).encode()))
        return path


def recorded(num_steps=4):
    tape = Tape()
    for _ in range(num_steps):
        tape.step()
    return tape
