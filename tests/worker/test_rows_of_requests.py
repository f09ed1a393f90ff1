"""Rows whose draft K/V waits belong to the requests of a step: the worker follows who comes and goes."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang_objects import batch, decoder, partly, request
from stage_loop import GraphLoop, prompts_of

from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.graphs import Relay

CPU = torch.device("cpu")


class WorkerLoop(GraphLoop):
    """Decodes greedy requests by the worker, on a server without features, and reads the results."""

    def step(self, number):
        if self.executors is None:
            self._start()
        worker, bs = self.worker, len(self.texts)
        for req, text in zip(self.reqs, self.texts, strict=True):
            req.kv.kv_committed_len = len(text) - 1
        running = batch(
            *self.reqs,
            seq_lens=torch.tensor([len(text) - 1 for text in self.texts]),
            req_pool_indices=torch.arange(bs),
            req_to_token_pool=partly(ReqToTokenPool, req_to_token=self.table),
            spec_info=partly(DSparkDraftInput, bonus_tokens=torch.tensor([text[-1] for text in self.texts])),
            return_logprob=False,
            has_grammar=False,
        )
        result = worker.decode(running, lambda lens: None)
        result.logits_output, result.copy_done = None, SimpleNamespace(record=lambda: None)
        result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
        result.read_copy()
        worker.control.observe(self.reqs, result.record, result.accept_lens.tolist(), (2.0, 0.5))
        rows = zip(result.record.committed.tolist(), result.accept_lens.tolist(), strict=True)
        for text, (tokens, kept) in zip(self.texts, rows, strict=True):
            text.extend(tokens[:kept])

    def _start(self):
        self.worker = decoder(self, schedule="off")
        self.executors = self.worker.executors
        self.executors.add_graphs(self._captured())
        self.schedule.fixed_draft_shape = True  # as on a server with graphs
        self.reqs = [request(rid=f"r{place}", top_k=1) for place in range(len(self.texts))]


def test_rows_of_requests_that_have_left_are_held_no_longer(monkeypatch):
    """Others may have their slots."""
    loop, found = WorkerLoop(monkeypatch, [3], relay=Relay(3, CPU), schedule="off"), []
    loop.serve(prompts_of(loop), 2)
    for number in range(4):
        if number == 2:
            loop.reqs[1] = request(rid="another", top_k=1)
        loop.step(90 + number)
        found.append(loop.drafter.held)
    assert found == [6, 9, 3, 6]
