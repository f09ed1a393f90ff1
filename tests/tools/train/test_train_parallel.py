"""Two processes of torchrun on a CPU against one: the same gradients, the same drafter, the files of one."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.train import trainer as trainer_module
from sglang_dspark.tools.train.batches import Piece, pieces_of, rows_of_piece
from sglang_dspark.tools.train.parallel import Processes, joined_processes, local_device
from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.run_folder import DRAFT_DIR
from sglang_dspark.tools.train.trainer import Trainer

# What each process runs: two steps and a checkpoint, then the gradients that it has.
PROGRAM = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from sglang_dspark.tools.train.parallel import joined_processes
from sglang_dspark.tools.train.target import Target
from sglang_dspark.tools.train.trainer import Trainer

folder = Path(sys.argv[1])
job = torch.load(folder / "job.pt", weights_only=False)
with joined_processes("cpu") as processes:
    assert processes.agree_on(2) and not processes.agree_on(processes.rank)
    target = Target(AutoModelForCausalLM.from_pretrained(folder / "target"), job["config"].target_layer_ids)
    trainer = Trainer(job["config"], target, job["corpus"], job["corpus"], folder / "out", processes=processes)
    trainer.run(until=3)
    torch.save({n: p.grad for n, p in trainer.model.named_parameters()}, folder / f"gradients{processes.rank}.pt")
    trainer.run()
    torch.save(trainer.model.state_dict(), folder / f"weights{processes.rank}.pt")
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole"),
        pytest.param({"micro_batch_rows": 2, "max_minutes": 60.0}, id="pieces"),
    ],
)
def test_two_processes_train_the_drafter_of_one_with_twice_the_batch(changes, target, corpus, config, tmp_path):
    """Six texts a step: three for each of two processes, whose lengths differ."""
    config = replace(config, **changes)
    target.model.save_pretrained(tmp_path / "target")
    torch.save({"config": config, "corpus": corpus}, tmp_path / "job.pt")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        program,
        tmp_path,
    ]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr[-4000:]

    alone = Trainer(config, target, corpus, corpus, tmp_path / "alone")
    alone.run(until=3)
    expected = {name: p.grad for name, p in alone.model.named_parameters()}
    first, second = (torch.load(tmp_path / f"gradients{rank}.pt") for rank in range(2))
    for name, gradient in expected.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    alone.run()
    first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        # Adam divides by the size of gradients: where it is next to nothing, its rounding shows.
        torch.testing.assert_close(first[name], weight, atol=2e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("out", "alone")
    )
    assert [(line["step"], line["held_out"]) for line in ours] == [(line["step"], line["held_out"]) for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert mine["tau"] == pytest.approx(other["tau"], rel=1e-3)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {DRAFT_DIR, "training_state.pt", "log.jsonl"}


def rows_of(*lengths):
    return Piece(
        [CorpusRow(torch.zeros(length), 1) for length in lengths], [torch.tensor([i]) for i in range(len(lengths))]
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 4, 20])
def test_every_text_is_read_by_one_process_beside_texts_of_its_length(count, most):
    lengths = (9, 3, 7, 7, 12, 5, 4)
    whole = rows_of(*lengths)
    pieces = [piece for rank in range(count) for piece in pieces_of(whole, most, rank, count)]
    read = [int(anchor) for piece in pieces for anchor in piece.anchors]
    assert sorted(read) == list(range(len(lengths)))
    for piece in pieces:
        assert len(piece.rows) <= min(most, rows_of_piece(len(lengths), most, count))
        assert [len(row.input_ids) for row in piece.rows] == [lengths[int(anchor)] for anchor in piece.anchors]
    ordered = sorted(pieces, key=lambda piece: len(piece.rows[0].input_ids))
    spans = [[len(row.input_ids) for row in piece.rows] for piece in ordered]
    assert [length for span in spans for length in span] == sorted(lengths)


@pytest.mark.parametrize("count", [2, 4])
def test_no_process_has_the_longest_texts_of_every_step(count):
    """All wait for the one that has most to read."""
    whole = rows_of(*range(10, 10 + 8 * count))
    read = []
    for rank in range(count):
        pieces = list(pieces_of(whole, 100, rank, count))
        assert len(pieces) == 2
        read.append(sum(len(piece.rows) * max(len(row.input_ids) for row in piece.rows) for piece in pieces))
    assert max(read) == min(read)
    assert sum(read) < len(whole.rows) * (10 + 8 * count)  # all texts as long as the longest
    assert [len(list(pieces_of(rows_of(3, 4, 5), 100, rank, 3))) for rank in range(3)] == [1, 1, 1]


def test_fewer_texts_than_processes_are_refused(target, corpus, config, tmp_path):
    with pytest.raises(ConfigError, match=r"batch_rows=6: 7 processes share .* --batch-rows 7, or start fewer"):
        Trainer(config, target, corpus, corpus, tmp_path, processes=Processes(0, 7))


def test_a_process_alone_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_processes("cpu") as processes:
        assert processes == Processes(0, 1)
        assert processes.agreed(1.5) == 1.5
        assert processes.agree_on(3)
    assert not torch.distributed.is_initialized()


def test_a_process_alone_works_on_the_gpu_that_was_named(monkeypatch):
    """Triton launches on the current device, and not where the tensors are."""
    chosen = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu"):
        with joined_processes(device):
            pass
    assert chosen == ["cuda:1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_fails_ends_without_the_others(fails, monkeypatch):
    """They are in the middle of a step, and torchrun ends them when this one is gone."""
    done = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: done.append((backend, timeout)))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: (backend, timeout))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    with pytest.raises(RuntimeError) if fails else nullcontext(), joined_processes("cuda") as processes:
        assert processes.rank == 1
        if fails:
            raise RuntimeError
    [(backend, patience), *ended] = done
    assert ended == ([] if fails else ["destroyed"])
    # Texts may take days to write, a step does not.
    assert backend == "cpu:gloo,cuda:nccl" and patience < timedelta(hours=1)
    assert processes.meeting == ("gloo", timedelta(days=30))


class SecondOfTwo(Processes):
    """Whose first process has begun anew."""

    def agree_on(self, number):
        return number == 0

    def wait(self):
        pass

    def add_up(self, tensors):
        pass

    def share(self, tensors):
        pass


def test_weights_are_drawn_once(target, corpus, config, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(trainer_module, "initialise", lambda *given: drawn.append(given))
    Trainer(config, target, corpus, corpus, tmp_path / "second", processes=SecondOfTwo(1, 2))
    assert drawn == []
    Trainer(config, target, corpus, corpus, tmp_path / "first", processes=SecondOfTwo(0, 2))
    assert len(drawn) == 1


def test_processes_that_see_different_folders_are_refused(target, corpus, config, tmp_path):
    second = SecondOfTwo(1, 2)
    assert Trainer(config, target, corpus, corpus, tmp_path / "new", processes=second).step == 0
    Trainer(config, target, corpus, corpus, tmp_path / "own").run(until=3)
    with pytest.raises(ConfigError, match=r"--output \S+/own: .* this one after 3; all machines need the same folder"):
        Trainer(config, target, corpus, corpus, tmp_path / "own", processes=second)


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    assert local_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [local_device(device) for device in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
