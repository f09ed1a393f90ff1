"""Decodes without a server: the served executors on the golden pair, whose target is transformers' own.

Steps as on a GPU are staged into tiers and replayed by calling again. A recorded graph launches again what was
launched, and runs no line of Python between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from dspark_kernels import (
    MOST_MATCH,
    USUAL,
    Adjustment,
    AdjustmentTable,
    ChainRules,
    RoundKeys,
    SamplingBatch,
    SecondTexts,
    adjust,
)
from golden_replay import Golden, lend_target, load_golden
from reference_decoding import Target
from replays import Emulated
from step_tables import make_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import InterpretedFunction

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.formats import Reading
from sglang_dspark.draft.formats.content import TensorRules
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.draft.weights import ResolvedDrafter, load_draft_model
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.part import CandidateSource, StepPart
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision, StepRecord
from sglang_dspark.step.state import DecodeBatch, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker import graphs
from sglang_dspark.worker.drafter import Drafter, NoDrafter
from sglang_dspark.worker.eager import EagerExecutor
from sglang_dspark.worker.graphs import CapturedSteps, ExecutorSelector

DATA = Path(__file__).parents[1] / "data" / "golden"
DRAFT = DATA / "vanilla_g7"
CPU = torch.device("cpu")
COLUMNS = 256  # K/V slots of a request
NO_CHAINS = (MOST_MATCH + 1, *USUAL[1:])


class OneRank:
    """SGLang's group of a server with one rank, whose own class takes seconds to import."""

    world_size, rank_in_group = 1, 0

    def broadcast_object(self, value):
        return value


def lookup_of(gamma: int) -> CandidateSource:
    """Return what finds candidates; the tests of the core run where its folder is gone."""
    from sglang_dspark.features.prompt_lookup import PromptLookup
    from sglang_dspark.features.prompt_lookup.rules import AnswerCache, ForcedTokens

    return PromptLookup(AnswerCache(0), ForcedTokens(None, COLUMNS, gamma + 1), CPU)


def golden_network() -> Any:
    """Return the golden target, as transformers have it."""
    return AutoModelForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()


class StageLoop:
    """Serves a batch of prompts to the end, as the worker does.

    Attributes:
        golden: what the checkpoint's own implementation gives for its prompts.
        network: the target, as transformers have it; None if it is made otherwise.
        noise_seed: of requests without a seed of their own.
        keys_of: makes the noise keys of a step, as :class:`RoundKeys` does.
        filters: top-k, top-p and min-p of all requests.
        adjustment: penalties and biases of all requests; None for none.
        bounds: of the requests' chains, in turn; None for the usual ones. No request has any chain at first, and none
            ever without ``lookup``.
        second: see :class:`ChainRules`; None without.
        texts: committed ids of every request.
        traces: [(start, anchor, drafts, accepted)] of every request.
    """

    network: Any = None

    def __init__(
        self,
        table: SpsTable | None = None,
        draft: Path = DRAFT,
        lookup: bool = False,
        network: Any = None,
        **options: Any,
    ) -> None:
        resolved = ResolvedDrafter.read(draft)
        model = load_draft_model(draft, dtype=torch.float32, device="cpu", reading=resolved.reading)
        self.network = network or golden_network()
        self.set_up(model, lend_target(self.network, model), table, options, lookup, resolved)

    def set_up(
        self,
        model: DraftModel,
        target: Target,
        table: SpsTable | None,
        options: dict[str, Any],
        lookup: bool = False,
        resolved: ResolvedDrafter | None = None,
    ) -> None:
        self.target = target
        config = DSparkConfig(**options)
        self.gamma = config.gamma(model.config.gamma)
        candidates = lookup_of(self.gamma) if lookup else None
        self.drafter: Drafter | NoDrafter = Drafter(
            resolved or ResolvedDrafter(str(DRAFT), Reading("DeepSpec", model.config, TensorRules(), (), ()), None),
            model,
            ProposalHeads(model, None if resolved is None else resolved.token_ids),
            gamma=self.gamma,
            device=CPU,
            target=SimpleNamespace(features=lambda ids, captured: captured, dtype=torch.float32, weights=self._weights),
            candidates=candidates,
        )
        if config.draft_free:
            self.drafter = NoDrafter(config, model.config.vocab_size, CPU, candidates)
        self.schedule = Schedule(config, self.gamma, self.drafter.calibration(config, self.gamma), CPU)
        self.schedule.start(table)
        self.eager = EagerExecutor(self.drafter, self.schedule, self.verify, Agreement(OneRank()))
        self.noise_seed, self.keys_of = 1, RoundKeys
        self.filters = (-1, 1.0, 0.0)
        self.adjustment: Adjustment | None = None
        self.bounds: list[tuple[int, ...]] | None = [NO_CHAINS]
        self.second: SecondTexts | None = None

    def _weights(self, model: DraftModel) -> tuple[torch.Tensor, torch.Tensor]:
        return self.network.get_input_embeddings().weight, self.network.get_output_embeddings().weight

    @cached_property
    def golden(self) -> Golden:
        return load_golden(DRAFT)

    @torch.no_grad()
    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int | None] = (),
    ) -> list[list[int]]:
        """Output of every prompt: ``num_tokens`` each, or a few more."""
        bs = len(prompts)
        self.drafter.allocate(bs * COLUMNS + 1, torch.float32)
        self.table = (1 + torch.arange(bs * COLUMNS)).view(bs, COLUMNS).int()
        self._parameters = [(temperature, *self.filters, seed) for seed in seeds or [None] * bs]
        self.texts, self.traces = [], [[] for _ in prompts]
        for request, prompt in enumerate(prompts):
            logits, features = self.target(prompt)
            slots = self.table[request, : len(prompt)].long()
            self.drafter.inject(torch.tensor(prompt), features, torch.arange(len(prompt)), slots)
            self.drafter.remember(torch.tensor(prompt), slots)
            self.texts.append([*prompt, int(logits[-1].argmax())])
        self._counted, self._counts = torch.arange(bs), None
        if self.adjustment is not None:
            self._counts = AdjustmentTable.empty(bs, logits.shape[1], CPU)
            for request, prompt in enumerate(prompts):
                self._counts.set(request, self.adjustment, self.texts[request][len(prompt) :])
        number = 0
        while min(len(text) - len(prompt) for text, prompt in zip(self.texts, prompts, strict=True)) < num_tokens:
            number += 1
            self.step(number)
        return [text[len(prompt) :][:num_tokens] for text, prompt in zip(self.texts, prompts, strict=True)]

    def batch(self, number: int) -> DecodeBatch:
        bs = len(self.texts)
        prefix_lens = torch.tensor([len(text) - 1 for text in self.texts])
        return DecodeBatch(
            anchors=torch.tensor([text[-1] for text in self.texts]),
            prefix_lens=prefix_lens,
            req_pool_indices=torch.arange(bs),
            req_to_token=self.table,
            rows=self.rows(range(bs)),
            rows_of=self.rows,
            rules=self._rules(bs),
            keys=self.keys_of(self.noise_seed, number, torch.arange(bs), prefix_lens + 1),
        )

    def _rules(self, bs: int) -> ChainRules | None:
        if self.bounds is None or self.drafter.candidates is None:
            return None
        return ChainRules(torch.tensor([self.bounds[r % len(self.bounds)] for r in range(bs)]), self.second)

    def step(self, number: int) -> None:
        bs, step = len(self.texts), self.batch(number)
        names = [f"r{request}" for request in range(bs)]
        context = float(step.prefix_lens.double().mean())
        decision = self.eager.agreement.share(self.schedule.choose(names, context))
        outcome = self.run(step, decision, [self])
        draft, plan, accepted = outcome.draft, outcome.plan, outcome.accepted
        if self._counts is not None:
            self._counts.count(self._counted, accepted.out_tokens)
        self.schedule.end_step(decision, bs, len(plan.input_ids))
        lens = plan.verify_lens[:bs]  # after them the padding of a graph
        # The next replay writes to where this step's chains are.
        chains = None if draft.block.chains is None else draft.block.chains.clone()
        learned = {"chains": chains, "committed": accepted.out_tokens.clone()}
        drafted = draft.draft_lens if self.drafter.num_drawn else [0] * bs
        record = StepRecord(names, decision, drafted, lens, draft.confidence, None, **learned)
        self.schedule.observe(record, list(range(bs)), accepted.accept_lens.tolist())
        for request, (text, kept) in enumerate(zip(self.texts, accepted.accept_lens.tolist(), strict=True)):
            drafts = draft.block.tokens[request].tolist()
            self.traces[request].append((len(text) - 1, text[-1], drafts, kept))
            text.extend(accepted.out_tokens[request, : kept + 1].tolist())

    def run(self, step: DecodeBatch, decision: StepDecision, parts: Sequence[StepPart]) -> StepOutcome:
        return self.eager.run(step, decision, parts)

    def before_verify(self, plan: VerifyPlan) -> None:
        pass

    def after_verify(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        if self._counts is not None:
            adjust(logits, self._counts, self._counted, plan.requests, plan.columns, plan.input_ids, plan.indptr)

    def rows(self, requests: Sequence[int]) -> SamplingBatch:
        return SamplingBatch.from_lists(*zip(*(self._parameters[request] for request in requests), strict=True))

    def verify(self, step, plan) -> TargetOutput:
        """The target over every request's whole text: no K/V, so none can be wrong."""
        starts, ids = plan.indptr.tolist(), plan.input_ids.tolist()
        logits, features = [], []
        for request, text in enumerate(self.texts):
            window = ids[starts[request] : starts[request + 1]]
            assert window[0] == text[-1]
            whole_logits, whole_features = self.target([*text, *window[1:]])
            logits.append(whole_logits[-len(window) :])
            features.append(whole_features[-len(window) :])
        return TargetOutput(SimpleNamespace(next_token_logits=torch.cat(logits)), torch.cat(features))


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

    def batch(self, number):
        return replace(super().batch(number), keeps_logits=self.keeps_logits)

    def run(self, step, decision, hooks):
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
                output = self.verify(step, plan)
                found = output.logits_output.next_token_logits
                kept.fill_(torch.nan)  # what padding is, nobody may ask
                kept[: len(found)], captured[: len(found)] = found, output.captured
                return TargetOutput(SimpleNamespace(next_token_logits=kept), captured, advance)

            def advance(lengths):
                self.advanced.append(lengths.tolist())

            return run

        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.table), attn_backend=None)
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


T = TypeVar("T")

aten = torch.ops.aten
MEMORY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default}


class RecordedGraph(Generic[T]):
    """Records a function, and replays its operations and interpreted kernels on the tensors that they had.

    Attributes:
        output: what the function returned; every replay overwrites its tensors.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._tape: list[Callable[[], None]] = []
        launch = InterpretedFunction.run

        def launch_recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            operations.stopped = True
            launch(kernel, *args, **kwargs)
            operations.stopped = False
            self._tape.append(partial(launch, kernel, *args, **kwargs))

        with pytest.MonkeyPatch.context() as patch, _Operations(self._tape) as operations:
            patch.setattr(InterpretedFunction, "run", launch_recorded)
            self.output = run()

    def replay(self) -> T:
        """Run the operations and kernels again."""
        for launch in self._tape:
            launch()
        return self.output


class _Operations(TorchDispatchMode):
    """Records operations of torch, unless ``stopped``, as inside of a kernel."""

    def __init__(self, tape: list[Callable[[], None]]) -> None:
        super().__init__()
        self._tape, self.stopped = tape, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.stopped and func not in MEMORY:
            self._tape.append(partial(_again, partial(func, *args, **(kwargs or {})), result))
        return result


def _again(run: Callable[[], Any], result: Any) -> None:
    """Write what an operation returns now to where it has written first."""
    for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
