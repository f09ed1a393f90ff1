"""Measures how long the steps of SGLang's own worker take, by running them."""

from typing import Any

from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

from sglang_dspark.engine.measure_steps import DummyBatch, Stepper, load_or_measure, table_key
from sglang_dspark.features.own_worker.driver import ScheduledWorker
from sglang_dspark.features.own_worker.step import ScheduledStep
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength


def step_times(driver: ScheduledWorker) -> SpsTable | None:
    """Return the measured times of steps; None for a policy that needs none."""
    stepper = Stepper(
        driver.target_worker,
        driver.agreement,
        driver.gamma,
        of=lambda dummy: MeasuredSteps(driver, dummy),
        tiers=driver.rows.tiers,
    )
    key = table_key(
        driver.target_worker,
        driver.server_args,
        draft_path=driver.server_args.speculative_draft_model_path,
        block_size=driver.gamma,
        max_verify=driver.gamma,
        cuda_graphs=f"SGLang's own, {driver.rows.digest}",
    ) | {"enable_lora": str(driver.server_args.enable_lora)}
    return load_or_measure(stepper, driver.options, key)


class MeasuredSteps:
    """Steps of greedy requests that do not exist, in the two parts that a table has times of."""

    def __init__(self, driver: ScheduledWorker, dummy: DummyBatch) -> None:
        self._driver, self._dummy = driver, dummy
        self._tokens = dummy.tokens(driver.gamma + 1)[:, 1:].contiguous()
        # Served steps have no lengths on the host then, and with them the worker would wait for the device.
        on_host = (
            driver.server_args.disable_overlap_schedule or driver.worker.model_runner.attn_backend.needs_cpu_seq_lens
        )
        self._lengths_on_device = driver.device.type == "cuda" and not on_host

    def draft(self, depth: int) -> None:
        """Draft whole blocks: the worker knows no shorter ones."""
        worker, batch = self._driver.worker, self._dummy.fresh()
        self._driver.step = self._driver.whole_blocks(len(self._tokens))
        given: dict[str, Any] = {"batch": batch, "bs": len(self._tokens), "device": worker.device}
        window = alloc_verify_window(
            **given,
            verify_num_draft_tokens=worker.verify_num_draft_tokens,
            block_pos_offsets=worker._block_pos_offsets,
            model_runner=worker.model_runner,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        with worker._draft_context():
            worker._proposer.propose(
                **given,
                draft_input=batch.spec_info,
                verify_window=window,
                target_model=worker.model_runner.model,
                sampling_info=None,
            )

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        decision = StepDecision(drafts, FixedLength(), with_confidence=False)
        self._driver.step = ScheduledStep(decision, len(self._tokens), self._driver.rows, self._tokens)
        batch: Any = self._dummy.fresh()
        batch.forward_iter = 0  # which the worker's own observers read
        if self._lengths_on_device:
            batch.seq_lens_cpu = batch.seq_lens_sum = None
        self._driver.worker._forward_decode(batch, None)
