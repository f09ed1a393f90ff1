"""Steps as on a GPU, without a server: staged into tiers, laid out in buffers, replayed by calling again."""

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import torch
from replays import Emulated
from stage_loop import StageLoop
from step_tables import make_table

from sglang_dspark.step.state import TargetOutput
from sglang_dspark.worker import graphs
from sglang_dspark.worker.graphs import CapturedSteps, ExecutorSelector


class GraphLoop(StageLoop):
    """Runs its steps by graphs if they fit into them.

    Attributes:
        replayed: whether each step was.
        outcomes, copies: of each step, and what they were when it ended.
        advanced: by how many rows states were advanced, of each step.
        limits: what requests ask for.
        keeps_logits: whether somebody reads the logits of its steps.
    """

    keeps_logits = False
    parts = ()

    def __init__(self, monkeypatch, slots, limits=None, relay=None, **options):
        super().__init__(make_table(lambda r, d, c: 10 + d * r, lambda r, d, c: 1 + 0 * r, gamma=7), **options)
        self._slots, self._patch, self.limits, self.relay = slots, monkeypatch, limits, relay
        self.replayed, self.outcomes, self.copies, self.advanced = [], [], [], []
        choose = self.schedule.choose
        self.schedule.choose = lambda ids, context, *_, **__: choose(ids, context, self.limits)
        self.executors = None

    def _batch(self, number):
        return replace(super()._batch(number), keeps_logits=self.keeps_logits)

    def _run(self, step, decision, hooks):
        if self.executors is None:
            self.start_graphs()
        executor = self.executors.select(step, decision)
        outcome = executor.run(step, decision, hooks)
        self.replayed.append(executor.in_graphs)
        self.outcomes.append(outcome.accepted)
        self.copies.append(deepcopy(outcome.accepted))
        return outcome

    def start_graphs(self):
        """Capture them."""
        self.executors = ExecutorSelector(self.eager)
        self.executors.add_graphs(self._captured())

    def _captured(self):
        @contextmanager
        def capturing(runner):
            yield Emulated

        def static_verify(runner, step, plan, logits, *_):
            captured = torch.zeros(len(plan.input_ids), self.drafter.model.fc.weight.shape[1])
            kept = torch.zeros(len(plan.input_ids), self.num_tokens) if logits is None else logits

            def run():
                if int(plan.indptr[-1]) == 0:  # captured before there is a step
                    return TargetOutput(SimpleNamespace(next_token_logits=kept), captured, advance)
                output = self._verify(step, plan)
                found = output.logits_output.next_token_logits
                kept.fill_(torch.nan)  # what padding is, nobody may ask
                kept[: len(found)], captured[: len(found)] = found, output.captured
                return TargetOutput(SimpleNamespace(next_token_logits=kept), captured, advance)

            def advance(lengths):
                self.advanced.append(lengths.tolist())

            return run

        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self._table), attn_backend=None)
        self.num_tokens = len(self.target([1])[0][0])
        runner.model_config = SimpleNamespace(vocab_size=self.num_tokens)
        buffer = lambda runner, rows: torch.zeros(rows, runner.model_config.vocab_size)  # noqa: E731
        for name, value in {"capturing": capturing, "static_verify": static_verify, "logits_buffer": buffer}.items():
            self._patch.setattr(graphs, name, value)
        self._patch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
        steps = CapturedSteps(
            self.eager, runner, self._slots, self.gamma, seed=self.noise_seed, relay=self.relay, parts=self.parts
        )
        steps.capture()
        self.advanced.clear()
        return steps


def prompts_of(loop):
    return [case.prompt_ids for case in loop.golden.cases[:3]]
