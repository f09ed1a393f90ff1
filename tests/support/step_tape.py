"""Chrome traces of decode steps, made by hand."""

import gzip
import json

# (name, microseconds) in the order in which they run; one graph launch per list.
DRAFT = [("embed", 2), ("gemm", 30), ("lm_head", 60), ("choose_kernel", 5), ("latent", 1), ("choose_kernel", 6)]
VERIFY = [("attention", 40), ("gemm", 160)]
ACCEPT = [("row_stats_kernel", 4), ("judge_kernel", 2), ("gemm", 7), ("_kv_inject_kernel", 3)]


class Tape:
    """A Chrome trace whose activities run one after the other, with 1 us between them."""

    def __init__(self):
        self.events, self.now_us, self.calls = [], 1000.0, 0

    def graph(self, kernels, category="kernel"):
        self.calls += 1
        # The host is ahead of the GPU, and its events come in another order.
        event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1}
        self.events.insert(0, event | {"args": {"correlation": self.calls}})
        for name, us in kernels:
            event = {"ph": "X", "cat": category, "name": name, "ts": self.now_us, "dur": us}
            self.events.append(event | {"args": {"correlation": self.calls, "stream": 7}})
            self.now_us += us + 1

    def step(self, slow=0):
        """A step of seven launches; ``slow`` microseconds more in the target's forward."""
        self.graph([("_prepare_kernel", 1)])
        self.graph(DRAFT)
        self.graph([("_plan_kernel", 2)])
        self.graph([*VERIFY[:1], ("gemm", 160 + slow)])
        self.graph(ACCEPT)
        self.graph([("Memcpy DtoH (Device -> Pinned)", 3)], "gpu_memcpy")
        self.graph([("index_put", 5)])  # for the next step

    def save(self, path):
        document = {"deviceProperties": [{"name": "Some GPU"}], "traceEvents": self.events}
        path.write_bytes(gzip.compress(json.dumps(document).encode()))
        return path


def recorded():
    """Three complete steps, and the beginning of a fourth."""
    tape = Tape()
    for _ in range(4):
        tape.step()
    return tape
