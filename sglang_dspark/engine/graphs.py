"""CUDA graphs the way SGLang captures them, of functions that are ours, and what becomes of SGLang's own."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from dspark_kernels import AcceptResult
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.dp_attention import DpPaddingMode, set_dp_buffer_len, set_is_extend_in_batch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.overlap_utils import FutureRelayBuffers, offer_future_relay_buffers
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc, get_batch_sizes_to_capture
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import CapturedPart
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.engine.target import graph_context
from sglang_dspark.engine.verify import DSparkVerifyInput, slots_of_windows
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WARM_UPS = 2  # kernels are compiled and libraries make their workspaces
_uncopied: ContextVar[bool] = ContextVar("uncopied_logits", default=False)
"""Whether forwards return logits in the dtype of the target's LM head."""


class Captured(Generic[T]):
    """A captured function.

    Attributes:
        output: what it returned; its tensors live at fixed addresses, and every replay overwrites them.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, run: Callable[[], T], output: T) -> None:
        self._graph = graph
        self._run = run  # keeps the tensors alive that the kernels read
        self.output = output

    def replay(self) -> T:
        """Run the kernels again on what lies in the input tensors now."""
        self._graph.replay()
        return self.output

    def launched(self) -> T:
        """Run the captured function itself on the same input tensors, without the graph."""
        return self._run()


class Capture:
    """Captures functions into one memory pool, see :func:`capturing`."""

    def __init__(self, model_runner: ModelRunner, stream: torch.cuda.Stream) -> None:
        self._tp_group = get_parallel().tp_group
        self._stream, self._graph = stream, graph_context(model_runner)
        self._pool = get_or_create_global_graph_memory_pool(torch.cuda)
        set_graph_pool_id(self._pool)

    def __call__(self, run: Callable[[], T]) -> Captured[T]:
        """Capture ``run``, which works on tensors that stay where they are."""
        for _ in range(_WARM_UPS):
            torch.cuda.synchronize()
            self._tp_group.barrier()
            run()
        graph = torch.cuda.CUDAGraph()
        with self._graph(cuda_graph=graph, pool=self._pool, stream=self._stream):
            output = run()
        return Captured(graph, run, output)


@contextmanager
def capturing(model_runner: ModelRunner) -> Iterator[Capture]:
    """Enter the state in which SGLang's layers and collectives can be captured.

    All functions share one pool of memory: what is captured later may work in memory that earlier functions have given
    back, but not in their outputs. So a function whose output is read after another one was replayed must be captured
    before that other one. Within that order, large functions first: the small ones fit into their memory.
    """
    collect_garbage = resolving_view(model_runner.server_args).enable_cudagraph_gc
    with model_capture_mode(), freeze_gc(collect_garbage), graph_capture() as context:
        yield Capture(model_runner, context.stream)


class Relay:
    """SGLang's relay of per-request values between overlapped steps, as graphs write to it.

    Buffers that SGLang's future map adopts when it is made, after graphs were captured that write to them.

    A graph writes the outcome of its step after everything of that step has read the values before. The map then skips
    its own writing of that outcome, and records its event after the replay. Row 0 of the pool is no request's: padding
    is written there.

    Args:
        rows: of ``req_to_token``.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.buffers = FutureRelayBuffers(req_pool_size=rows, device=device)
        offer_future_relay_buffers(self.buffers)

    def write(self, rows: torch.Tensor, accepted: AcceptResult) -> None:
        """Write the outcome of a step of [n] ``rows``; captured."""
        self.buffers.new_seq_lens[rows] = accepted.new_seq_lens
        self.buffers.output_tokens[rows] = accepted.bonus_tokens

    def was_written(self, accepted: AcceptResult) -> None:
        """Let the map know that a graph has just written this outcome, which is published next."""
        self.buffers.published_seq_lens = accepted.new_seq_lens
        self.buffers.published_bonus = accepted.bonus_tokens


def graph_request_slots(model_runner: ModelRunner) -> list[int]:
    """Return the batch sizes that SGLang's options want captured, ascending; none if they turn CUDA graphs off."""
    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return []
    sizes, _ = get_batch_sizes_to_capture(model_runner, tokens_per_step())
    return sizes


def has_prefill_graphs(model_runner: ModelRunner) -> bool:
    """Return whether SGLang has captured CUDA graphs of prefill."""
    return model_runner.prefill_cuda_graph_runner not in (None, model_runner.eager_runner)


def logits_buffer(model_runner: ModelRunner, rows: int) -> torch.Tensor:
    """Return [rows, V] float32 for the logits of captured verifications.

    Graphs of prefill have a buffer for the largest batch, whose logits are read before the next step: no second one.
    """
    shared, vocab_size = model_runner.graph_shared_output, model_runner.model_config.vocab_size
    if shared is None or rows > shared.max_rows or not has_prefill_graphs(model_runner):
        return torch.empty((rows, vocab_size), device=model_runner.device)
    return shared.get_logits_buffer(vocab_size, rows=rows)


def static_verify(
    model_runner: ModelRunner,
    step: DecodeBatch,
    plan: VerifyPlan,
    logits: torch.Tensor | None,
    parts: Sequence[CapturedPart] = (),
) -> Callable[[], TargetOutput]:
    """Return the target's forward over the rows of ``plan``, to be captured.

    Args:
        step, plan: buffers that stay where they are.
        logits: [N, V] float32, where the logits go; None leaves them where they are and as they are.
        parts: what features add to captured verifications.

    Returns:
        A function that returns what :func:`sglang_dspark.engine.verify.run_verify` does.
    """
    num_tokens = len(plan.input_ids)
    real_tokens = torch.zeros((), dtype=torch.int32, device=plan.input_ids.device)
    layout = DSparkVerifyInput.of(plan)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        global_forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(step),
        input_ids=plan.input_ids,
        positions=plan.positions,
        out_cache_loc=plan.slots,
        req_pool_indices=step.req_pool_indices,
        seq_lens=step.prefix_lens,
        orig_seq_lens=step.prefix_lens,
        seq_lens_sum=num_tokens,  # for backends that plan on the host; ours does not
        num_token_non_padded=real_tokens,
        global_num_token_non_padded_cpu=num_tokens,  # of the tier: the host does not know the step's
        next_token_logits_buffer=logits,
        spec_algorithm=model_runner.spec_algorithm,
        spec_info=layout,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
    )

    def run() -> TargetOutput:
        # With the batch, from which routing of experts learns how many rows are real.
        context = forward_context(ForwardContext(attn_backend=model_runner.attn_backend), forward_batch=forward_batch)
        before = _uncopied.set(logits is None)
        try:
            with context:
                set_dp_buffer_len(None, num_tokens, forward_batch.dp_padding_mode.is_max_len(), None)
                set_is_extend_in_batch(False)
                real_tokens.copy_(plan.indptr[-1])
                layout.slots_of_windows = slots_of_windows(model_runner, plan.slots)
                for part in parts:
                    part.prepare(plan, forward_batch)
                output = model_runner.model.forward(plan.input_ids, plan.positions, forward_batch)
        finally:
            _uncopied.reset(before)
        return TargetOutput(replace(output, hidden_states=None), output.hidden_states, layout.advance)

    return run


@hook(
    "sglang.srt.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
    HookType.AROUND,
    where="scheduler",
    reason="it copies logits to float32, which changes no number, and reads and writes all of them in every step",
    by=Moment.SOME_TIME,
)
def copy_logits(
    original: Callable[..., torch.Tensor],
    processor: LogitsProcessor,
    logits: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Leave the copy of logits to float32 out where :data:`_uncopied` says so.

    Logits that SGLang caps after the copy are copied: in 16 bit, capped ones would be equal that were not.
    """
    if _uncopied.get() and not processor.final_logit_softcapping:
        return logits[:, : processor.vocab_size]
    return original(processor, logits, *args, **kwargs)


@hook(
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
    HookType.REPLACE,
    where="cuda",
    reason="the stock graphs verify one number of tokens per request; DSPARK captures graphs of its own steps",
    by=Moment.READY,
)
def no_decode_graphs(*, model_runner: ModelRunner) -> GraphCapture:
    """Capture nothing."""
    return _nothing_captured(None, "target_verify")


@hook(
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
    HookType.AROUND,
    where="cuda",
    reason="of the stock graphs of prefill only the breakable ones return the hidden states that the drafter reads; a"
    " capture that fails shall not end the start",
    by=Moment.READY,
)
def prefill_graphs(
    original: Callable[..., object], *, model_runner: ModelRunner, eager_runner: object, **others: object
) -> object:
    """Let SGLang capture; go on without graphs of prefills where that fails, or where they lose the hidden states."""
    try:
        if any(check_cuda_graph_backend(Phase.PREFILL, backend) for backend in (Backend.DISABLED, Backend.BREAKABLE)):
            return original(model_runner=model_runner, eager_runner=eager_runner, **others)
        logger.warning("DSPARK: prefill runs without CUDA graphs: those that SGLang has chosen return no hidden states")
    except Exception as error:
        if get_parallel().tp_size > 1:  # ranks capture in step: the others wait for this one
            raise
        logger.warning("DSPARK: prefill runs without CUDA graphs, which cannot be captured here: %s", error)
    return _nothing_captured(eager_runner, "prefill")


def _nothing_captured(runner: object, phase: str) -> GraphCapture:
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)
