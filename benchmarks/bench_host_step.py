"""CPU time of the scheduler's process per decode step: SGLang's own scheduler and our worker, without a device's work.

    python benchmarks/bench_host_step.py
    python benchmarks/bench_host_step.py --before OTHER_CHECKOUT --output RESULTS/host_step.json

Every configuration is a process with SGLang's real ``Scheduler`` on the golden pair of the tests: its queues, batches,
future map, result processing and output are what a server runs. The steps are those of a GPU, with CUDA graphs; what a
GPU would do of them is not done: replays and kernels return what lies in their buffers. The plain server fills them by
SGLang's own graph runner, for SGLang's Triton attention. So the figures hold Python, SGLang and small tensor
operations, which cost a CPU about what launching them on a GPU costs. Launches of Triton kernels and graphs cost
nothing here: their numbers stand beside the times. Two checkouts take turns, process by process. Neighbours on the
machine add to a step's CPU time, to the first quartile least. Function calls from Python, counted over further steps,
are the same on a busy machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from sglang_dspark.tools.launch import CPU_ENV

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = ("plain", "parked", "static", "auto")
PROMPT_TOKENS, KEPT = 8, 2  # drafts accepted in every step
WARM_UP_STEPS, STEPS, COUNTED_STEPS = 60, 180, 40
TIMEOUT_S = 600
CORES = 132  # of the GPU for which the plain server's attention is prepared


@click.command(help=__doc__)
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Checkout to compare with.")
@click.option("--requests", default="1,16,64", show_default=True, help="Numbers of running requests.")
@click.option("--configurations", default=",".join(CONFIGURATIONS), show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Processes per configuration and checkout.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--child", type=(click.Choice(CONFIGURATIONS), int), hidden=True)
def main(before: Path | None, requests: str, configurations: str, rounds: int, output: Path | None, child: Any) -> None:
    """Command line; see the module."""
    if child is not None:
        print(json.dumps(measure(*child)))
        return
    checkouts = {"before": before.resolve(), "now": ROOT} if before else {"now": ROOT}
    results = []
    for num in map(int, requests.split(",")):
        for configuration in configurations.split(","):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
            for _ in range(rounds):
                for name, checkout in checkouts.items():
                    runs[name].append(in_checkout(checkout, configuration, num))
            results.append(
                {"configuration": configuration, "requests": num, **{k: summary(v) for k, v in runs.items()}}
            )
            print(in_words(results[-1]), flush=True)
    if output is not None:
        from sglang_dspark.tools import provenance

        output.parent.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output, {**provenance.record(), "results": results})


def in_checkout(checkout: Path, configuration: str, requests: int) -> dict[str, Any]:
    """One process's measurement with the code of ``checkout``."""
    path = os.pathsep.join([str(checkout), str(checkout / "kernels")])
    env = {**os.environ, **CPU_ENV, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", configuration, str(requests)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the processes of one configuration: the median of each figure, and the counts of the first."""
    return {
        **{name: float(np.median([run[name] for run in runs])) for name in ("quartile_us", "median_us", "mean_us")},
        "per_step": runs[0]["per_step"],
    }


def in_words(result: dict[str, Any]) -> str:
    """A line for the terminal."""
    parts = [f"{result['requests']:4d} requests  {result['configuration']:7s}"]
    for name in ("before", "now"):
        if (run := result.get(name)) is not None:
            counts = ", ".join(f"{count:.2f} {what}" for what, count in run["per_step"].items())
            times = ", ".join(f"{key.removesuffix('_us')} {run[key]:6.0f}" for key in run if key.endswith("_us"))
            parts.append(f"{name}: {times} us ({counts})")
    return "  ".join(parts)


def measure(configuration: str, requests: int) -> dict[str, Any]:
    """Run a scheduler to the end of its steps, in this process."""
    import torch

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    scheduler = make_scheduler(configuration, requests, counts)
    stamps: list[int] = []

    def recv_requests() -> list[Any]:
        stamps.append(time.process_time_ns())
        if len(stamps) == WARM_UP_STEPS + STEPS:
            counts.clear()
            sys.setprofile(count)
        scheduler.gracefully_exit = len(stamps) == WARM_UP_STEPS + STEPS + COUNTED_STEPS
        return [request(number) for number in range(requests)] if len(stamps) == 1 else []

    def count(frame: Any, event: str, argument: Any) -> None:
        counts["calls"] += event in ("call", "c_call")

    scheduler.request_receiver = SimpleNamespace(recv_requests=recv_requests)
    nobody = SimpleNamespace(send_output=lambda *args: None)
    object.__setattr__(scheduler.output_streamer, "send_to_detokenizer", nobody)  # a frozen dataclass
    scheduler.run_event_loop()
    sys.setprofile(None)
    assert len(scheduler.running_batch.reqs) == requests, "a request has ended"
    took = np.diff(stamps[WARM_UP_STEPS : WARM_UP_STEPS + STEPS]) / 1e3
    per_step = {what: number / COUNTED_STEPS for what, number in sorted(counts.items())}
    quartile, median = (float(value) for value in np.percentile(took, [25, 50]))
    return {"quartile_us": quartile, "median_us": median, "mean_us": float(took.mean()), "per_step": per_step}


def make_scheduler(configuration: str, requests: int, counts: Counter[str]) -> Any:
    """SGLang's scheduler on the golden pair, its device's work taken out."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    golden = ROOT / "tests" / "data" / "golden"
    dspark = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(golden / "vanilla_g7")]
    load_plugins()
    args = prepare_server_args(
        [
            *("--model-path", str(golden / "target"), "--device", "cpu", "--dtype", "float32"),
            *(
                "--disable-cuda-graph",
                "--mem-fraction-static",
                "0.3",
                "--max-total-tokens",
                str(1100 * requests + 1100),
            ),
            *("--max-running-requests", str(requests), "--skip-server-warmup", "--disable-radix-cache"),
            *(() if configuration == "plain" else (*dspark, "--speculative-dspark-schedule", "auto")),
        ]
    )
    if configuration != "plain":
        without_a_device(requests, counts)
    scheduler = Scheduler(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
    if configuration == "plain":
        with_stock_graphs(scheduler.tp_worker.model_runner, requests, counts)
    elif configuration != "auto":
        scheduler.draft_worker.switch_policy({"policy": configuration.replace("parked", "off")})
    return scheduler


def request(number: int) -> Any:
    """A greedy request that runs to the end of the context."""
    from array import array

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(max_new_tokens=1000, temperature=0, ignore_eos=True)
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=f"request-{number}",
        input_text="",
        input_ids=array("q", [3 + (number + place) % 50 for place in range(PROMPT_TOKENS)]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )


def with_stock_graphs(runner: Any, requests: int, counts: Counter[str]) -> None:
    """Decode steps of a plain server prepare the replay of a graph as on a GPU, by SGLang's own graph runner.

    Attention is SGLang's Triton backend, whose kernels are launched for nothing.
    """
    import torch
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as stock

    from sglang_dspark.scheduling.sps_table import geometric_grid

    slots = geometric_grid(requests)

    class Launched:
        def __getitem__(self, grid: Any) -> Any:
            counts["kernels"] += 1
            return lambda *args, **kwargs: None

    class Replayed:
        def __init__(self) -> None:
            vocabulary = runner.model_config.vocab_size
            self.outputs = {size: LogitsProcessorOutput(torch.zeros(size, vocabulary)) for size in slots}

        def replay_session(self) -> Any:
            return nullcontext()

        def replay(self, key: Any, forward_batch: Any) -> Any:
            counts["graphs"] += 1
            return self.outputs[key.size]

    triton_backend.create_flashinfer_kv_indices_triton = triton_backend.get_num_kv_splits_triton = Launched()
    triton_backend.get_device_core_count = lambda device: CORES
    stock.get_batch_sizes_to_capture = lambda *args: (slots, [])
    stock.resolve_decode_backend = lambda graphs: Replayed()
    stock.DecodeCudaGraphRunner.capture = lambda graphs: None
    runner.graph_shared_output = SimpleNamespace(get_logits_buffer=lambda size, rows: torch.zeros(rows, size))
    attention = triton_backend.TritonAttnBackend(runner)
    runner.decode_cuda_graph_runner = stock.DecodeCudaGraphRunner(runner, attn_backend=attention)
    # What a CPU is asked in place of this.
    forward_mode = stock.ForwardMode
    forward_mode.is_cpu_graph = forward_mode.is_cuda_graph


def without_a_device(requests: int, counts: Counter[str]) -> None:
    """Steps of our worker replay graphs that do nothing."""
    import torch
    from dspark_kernels import Accepted, DraftBlock
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
    from sglang_dspark.step.state import TargetOutput
    from sglang_dspark.worker import graph_stages, stages, verify_plan, worker

    class Replayed:
        def __init__(self, run: Any) -> None:
            self.output = run()

        def replay(self) -> Any:
            counts["graphs"] += 1
            return self.output

    @contextmanager
    def capturing(runner: Any) -> Any:
        yield Replayed

    def launch(result: Any, *args: Any, **kwargs: Any) -> Any:
        counts["kernels"] += 1
        return result(*args, **kwargs)

    def static_verify(runner: Any, step: Any, plan: Any, logits: Any, adapters: Any = None) -> Any:
        kept = torch.zeros(len(plan.input_ids), 1) if logits is None else logits
        return lambda: TargetOutput(LogitsProcessorOutput(kept), torch.zeros(len(plan.input_ids), 1))

    def propose(drafter: Any, step: Any, depth: int, *args: Any, **kwargs: Any) -> Any:
        tokens = torch.zeros((len(step), depth), dtype=torch.int64)
        return DraftBlock(tokens, None, torch.full((len(step), depth), 1.5))

    def accept(eager: Any, step: Any, drafted: Any, plan: Any, output: Any) -> Any:
        bs, depth = len(step), drafted.width
        kept = min(KEPT, depth)
        out_tokens = torch.full((bs, depth + 1), -1)
        out_tokens[:, : kept + 1] = 7
        lens = torch.full((bs,), kept)
        return Accepted(lens, out_tokens[:, kept].clone(), out_tokens, step.prefix_lens + lens + 1)

    def initialise(self: Any, original: Any = worker.DSparkWorker.__init__, **kwargs: Any) -> None:
        original(self, **kwargs)
        self.on_gpu = True

    def table(staging: Any, target_worker: Any, server_args: Any, max_verify: int) -> Any:
        drafts, grid = np.arange(max_verify + 1), geometric_grid(requests)
        return SpsTable(
            key={},
            requests=grid,
            drafts=drafts.tolist(),
            contexts=[64],
            draft_ms=np.tile((drafts > 0)[None, :, None] * 0.2, (len(grid), 1, 1)),
            verify_ms=(1.0 + 0.001 * np.outer(grid, 1 + drafts))[:, :, None],
            tiers=list(staging.graphs.tiers.tokens),
        )

    graph_stages.capturing, graph_stages.static_verify = capturing, static_verify
    graph_stages.prepare = partial(launch, lambda *args, **kwargs: None)
    verify_plan.plan_top = verify_plan.plan_uniform = partial(launch, lambda *args: args[-1])
    if hasattr(graph_stages, "plan_staged"):  # not so in older checkouts
        graph_stages.plan_staged = graph_stages.plan_uniform = verify_plan.plan_top
    stages.EagerStages.accept, stages.EagerStages.commit = accept, lambda *args: None
    stages.Drafter.propose = propose
    worker.DSparkWorker.__init__ = initialise
    worker.graph_request_slots = lambda runner: geometric_grid(requests)
    worker.load_or_measure, worker.report_late_kernels = table, lambda: None
    worker.warm_up = worker.hold_largest_step = lambda *args: None
    torch.cuda.mem_get_info = lambda: (0, 0)


if __name__ == "__main__":
    main()
