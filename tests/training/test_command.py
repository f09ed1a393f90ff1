"""``python -m sglang_dspark train`` on the golden target, given a chat template."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from dspark_training import corpus as corpus_module
from dspark_training import pipeline
from dspark_training.job import TrainJob
from dspark_training.settings import TextPlan
from dspark_training.target import Target
from dspark_training.trainer import Trainer
from dspark_training.writers import InProcessWriter

from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.cli import main

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "target"
# A turn is "the ... ." and the answer goes on after another "the", as in the text that this target was trained on.
TEMPLATE = "{% for m in messages %}the {{ m.content }} . {% endfor %}{% if add_generation_prompt %}the{% endif %}"
NOUNS = "cat dog bird fish tree river stone house boat lamp".split()
SMALL_TEXTS = (
    *("--max-tokens", 12, "--max-prompt-tokens", 16, "--held-out", 3, "--write-batch", 8, "--steps", 6),
    *("--batch-rows", 4, "--anchors", 4, "--checkpoint-every", 2),
)
SMALL = (*SMALL_TEXTS, "--rank", 8, "--block-size", 3)


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "target"
    shutil.copytree(GOLDEN, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"red {noun} sees the blue {noun}"]}) + "\n" for noun in NOUNS))
    return path


@pytest.fixture
def train(chat_target, prompts, tmp_path, monkeypatch):
    """``train("name", *options)`` works in ``tmp_path / "name"`` and gives the finished command."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(name, *options, target=chat_target, prompts=("--prompts", prompts), small=SMALL):
        fixed = ("train", "--target", target, "--output", tmp_path / name, *prompts, "--device", "cpu")
        return CliRunner().invoke(main, [str(argument) for argument in (*fixed, *small, *options)])

    return run


def written(folder):
    """Everything that a finished run has to leave behind, apart from times."""
    names = ("draft/model.safetensors", "draft/config.json", "evaluation.json", "corpus/prompts.jsonl")
    return [(folder / name).read_bytes() for name in names]


def test_prompts_from_a_file_and_invented_ones_become_a_measured_drafter(train, tmp_path, chat_target):
    result = train("run", "--invent", 6)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "run/corpus/prompts.jsonl").read_text().splitlines()]
    assert len(rows) == len(NOUNS) + 6
    assert sum(row["held_out"] for row in rows) == 3
    assert not any("." in turn for row in rows for turn in row["turns"])
    config = json.loads((tmp_path / "run/draft/config.json").read_text())
    assert (config["target_layer_ids"], config["mask_token_id"], config["num_hidden_layers"]) == ([1, 2, 3], 2, 1)

    model = load_draft_model(tmp_path / "run/draft", dtype=torch.float32, device="cpu")
    target = Target.from_pretrained(chat_target, (1, 2, 3), dtype=torch.float32)
    assert len(model.bind_target(target.embed_weight, target.lm_head_weight)) == 2
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert evaluation["steps"] == 6
    for name in ("greedy", "sampled"):
        assert len(evaluation[name]["survival"]) == 3
        assert f"{evaluation[name]['accept_length']:.2f}" in result.output
    assert "doctor --target" in result.output


@pytest.mark.slow
def test_a_run_killed_in_every_stage_equals_an_uninterrupted_one(train, tmp_path, monkeypatch):
    def killed_at_call(owner, name, call):
        whole, calls = getattr(owner, name), []

        def dies(*arguments, **options):
            calls.append(name)
            if len(calls) == call:
                raise KeyboardInterrupt
            return whole(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dies)
            assert train("killed", "--invent", 6).exit_code == 1
        assert len(calls) == call

    assert train("whole", "--invent", 6).exit_code == 0
    killed_at_call(corpus_module, "_write_shard", 2)
    killed_at_call(Trainer, "_train_step", 4)
    killed_at_call(Trainer, "_save", 2)
    result = train("killed", "--invent", 6)
    assert result.exit_code == 0, result.output
    assert "continuing after step 4" in result.output
    assert written(tmp_path / "killed") == written(tmp_path / "whole")


def test_the_texts_of_another_run_with_other_shapes_and_states(train, tmp_path):
    assert train("first", "--store-states", "--taps", "0,3", "--texts", 14).exit_code == 0
    corpus = tmp_path / "first" / "corpus"
    # Not given again: the texts keep the plan they were begun with.
    options = ("--corpus", corpus, "--taps", "0,3", "--head", "rnn", "--layers", 2, "--no-confidence-head")
    result = train("second", *options, "--own-embeddings", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "14 texts" in result.output
    assert not (tmp_path / "second" / "corpus").exists()
    model = load_draft_model(tmp_path / "second/draft", dtype=torch.float32, device="cpu")
    assert model.embed_tokens is not None
    assert model.lm_head is not None
    assert model.confidence_head is None
    assert (model.config.markov_head_type, model.config.num_hidden_layers) == ("rnn", 2)

    for options, says in (
        (("--taps", "1,2"), r"--taps 1,2: the texts in \S+ keep the states of layers 0,3; give these"),
        (("--texts", 3), r"--texts 3: the texts in \S+ were begun with 14; drop the option"),
    ):
        result = train("third", "--corpus", corpus, *options)
        assert result.exit_code == 1
        assert re.search(says, result.output)


def test_an_output_of_other_settings_is_refused(train):
    assert train("run").exit_code == 0
    result = train("run", "--rank", 4)
    assert result.exit_code == 1
    assert "markov_rank=4 (then 8); give the same settings to continue it, or another --output" in result.output


def test_training_by_the_clock_from_another_drafter(train, tmp_path):
    assert train("first").exit_code == 0
    options = ("--corpus", tmp_path / "first" / "corpus", "--init", tmp_path / "first" / "draft")
    result = train("second", *options, "--max-minutes", 5)
    assert result.exit_code == 0, result.output
    log = [json.loads(line) for line in (tmp_path / "second/log.jsonl").read_text().splitlines()]
    assert log[-1]["held_out"]
    assert log[-1]["step"] == 6  # of --steps, which come first


def test_a_server_of_its_own_writes_the_same_greedy_texts(train, tmp_path, chat_target, monkeypatch):
    """On a GPU the command starts a server; here the same pipeline runs with a stand-in for it."""
    made = []

    class Own(InProcessWriter):
        def __init__(self, target, device, dtype, stop_ids, vocab_size, concurrency):
            made.append((target, device, dtype, vocab_size, concurrency))
            super().__init__(Target.from_pretrained(target, (1,), dtype=torch.float32))
            assert stop_ids == self.stop_ids

        def __enter__(self):
            return self

        def __exit__(self, *error):
            made.append("stopped")

    assert train("here").exit_code == 0
    monkeypatch.setattr(pipeline, "OwnServerWriter", Own)
    monkeypatch.setattr(TrainJob, "writes_in_process", False)
    result = train("there")
    assert result.exit_code == 0, result.output
    assert made == [(str(chat_target), "cpu", "float32", 256, 512), "stopped"]
    assert written(tmp_path / "here") == written(tmp_path / "there")


@pytest.mark.parametrize(
    ("options", "here"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda:1"}, False),
        ({"device": "cuda", "store_states": True}, True),
        ({"device": "cpu", "server": "http://x"}, False),
    ],
)
def test_who_writes_the_texts(options, here, tmp_path):
    job = {"target": "t", "output": tmp_path, "corpus": tmp_path, "plan": TextPlan(), "plan_options": frozenset()}
    job |= {"concurrency": 1, "settings": {}, "compute_dtype": "float32"}
    assert TrainJob(**job, **options).writes_in_process == here


REFUSED = {
    "more held out than there is": (("--held-out", 10), "--held-out 10: of 10 prompts, 10 are distinct"),
    "taps beyond the target": (("--taps", "1,5"), "target_layer_ids=[1, 5] must be strictly increasing in [-1, 4]"),
    "no list": (("--taps", "1;2"), "'1;2' is not a list of numbers such as 1,2,3"),
    "no JSON": (("--chat-template-kwargs", "thinking"), "'thinking' is not a JSON object"),
    "a stop token as mask": (("--mask-token-id", 1), "--mask-token-id 1 ends an answer; drop the flag"),
    "a written token as mask": (("--mask-token-id", 33), "times in the answers"),
    "a mask outside": (("--mask-token-id", 256), "--mask-token-id 256 is not in the vocabulary of 256"),
    "states from a server": (("--store-states", "--server", "http://x"), "--store-states needs the target in this"),
    "a silent server": (("--server", "http://127.0.0.1:9"), "check that an SGLang server is running there"),
    "invented raw prompts": (("--raw", "--invent", 4), "with --raw, give --prompts instead"),
    "a device that is not there": (("--device", "cuda"), "finds no GPU; give --device cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_option_and_the_remedy(case, train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options, says = REFUSED[case]
    result = train("run", *options)
    assert result.exit_code != 0
    assert says in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prompts", "/nowhere/a.jsonl"), "--prompts /nowhere/a.jsonl: "),
        (("--taps", "1,5"), "target_layer_ids=[1, 5]"),
    ],
)
def test_prompts_and_taps_are_checked_before_the_target_is_loaded(options, says, train, monkeypatch):
    monkeypatch.setattr(Target, "from_pretrained", None)
    result = train("run", *options)
    assert (result.exit_code, says in result.output) == (1, True)


def test_a_target_that_is_not_there_or_has_no_chat_template(train):
    result = train("run", target="/nowhere/model")
    assert (result.exit_code, "--target /nowhere/model: there is no such folder" in result.output) == (1, True)
    result = train("run", target=GOLDEN)
    assert (result.exit_code, "its tokenizer has no chat template; give --raw" in result.output) == (1, True)
    # What was refused left nothing behind that a second try would have to agree with.
    assert train("run", "--raw", target=GOLDEN).exit_code == 0


def test_a_dry_run_counts_and_touches_nothing(train, tmp_path, chat_target):
    result = train("run", "--invent", 6, "--dry-run", "--max-minutes", 90, "--micro-batch-rows", 2)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "run").exists()
    target = Target.from_pretrained(chat_target, (1, 2, 3), dtype=torch.float32)
    weights = sum(p.numel() for p in target.model.parameters())
    assert f"parameters: target {weights / 1e6:,.1f} M" in " ".join(result.output.split())
    said = dict(re.findall(r"^ *(.+?)  +([\d.,]+)(?: |$)", result.output, re.MULTILINE))
    # Ten prompts and six invented ones, three held out, which are answered twice.
    assert said["answers to train on"] == "13"
    assert said["tokens that the target writes"] == str((13 + 2 * 3) * 12)
    assert said["tokens to train on, prompts included"] == str(13 * (12 + 16))
    assert said["blocks per step"] == "16"
    assert "1 h 30 min" in result.output
    # What it says of the drafter is what the run then has.
    result = train("run", "--invent", 6)
    (trained,) = re.findall(r"([\d.]+) M parameters to train", result.output)
    assert said["parameters: trained (1 layers, block size 3, rank 8)"] == trained
    # And what is begun tells the number of prompts.
    (tmp_path / "run" / "draft" / "config.json").unlink()
    again = train("run", "--dry-run")
    assert "answers to train on" in again.output and "time of training, at 40% of the" in again.output


@pytest.mark.parametrize(("options", "answers"), [((), 2 * 7), (("--max-turns", 1), 7), (("--raw",), 7)])
def test_a_dry_run_counts_the_turns_that_a_run_answers(options, answers, train, prompts):
    prompts.write_text("".join(json.dumps({"turns": [f"red {noun}", f"blue {noun}"]}) + "\n" for noun in NOUNS))
    result = train("run", "--dry-run", *options)
    assert re.search(rf"answers to train on +{answers} *$", result.output, re.MULTILINE), result.output


def test_a_run_from_a_drafter_takes_its_shape(train, tmp_path):
    assert train("first", "--rank", 4, "--layers", 2, "--taps", "0,3").exit_code == 0
    options = ("--corpus", tmp_path / "first" / "corpus", "--init", tmp_path / "first" / "draft")
    result = train("second", *options, "--head", "gated", small=SMALL_TEXTS)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "second/draft/config.json").read_text())
    assert [config[name] for name in ("block_size", "markov_rank", "num_hidden_layers")] == [3, 4, 2]
    assert (config["target_layer_ids"], config["markov_head_type"]) == ([0, 3], "gated")
    (ours, total) = re.search(r"(\d+) of (\d+) tensors are those of", result.output).groups()
    assert int(ours) == int(total) - 2
    assert "drawn anew: markov_head.gate_proj.bias, markov_head.gate_proj.weight" in result.output


def test_losses_and_optimizers_are_options(train, tmp_path):
    options = ("--optimizer", "muon", "--schedule", "linear", "--position-weights", "dpace", "--tv-weight", 0)
    result = train("run", *options, "--ce-weight", 1, "--draft-vocabulary", 20, "--patience", 1)
    assert result.exit_code == 0, result.output
    config = torch.load(tmp_path / "run" / "training_state.pt")["config"]
    assert (config["optimizer"], config["schedule"], config["draft_vocabulary"]) == ("muon", "linear", 20)
    assert (config["loss"]["ce"], config["loss"]["l1"], config["loss"]["positions"]) == (1.0, 0.0, "dpace")
    assert len(json.loads((tmp_path / "run/draft/draft_vocabulary.json").read_text())["token_ids"]) == 20
    for option, value in (("--position-decay", 0), ("--dpace-alpha", 1.5), ("--grad-clip", 0), ("--patience", 0)):
        result = train("other", option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.output


@pytest.mark.thorough
def test_two_processes_write_the_files_of_one(train, tmp_path, chat_target, prompts):
    """The whole command under torchrun: the first process writes and speaks, the other waits and trains along."""
    assert train("alone").exit_code == 0
    fixed = ("train", "--target", chat_target, "--output", tmp_path / "two", "--prompts", prompts, "--device", "cpu")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [str(argument) for argument in (*launcher, "-m", "sglang_dspark", *fixed, *SMALL)]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("Accept length on held-out texts") == 1
    assert run.stdout.count("parameters to train") == 1
    names = [sorted(path.name for path in (tmp_path / name).rglob("*")) for name in ("alone", "two")]
    assert names[0] == names[1]
    assert written(tmp_path / "alone")[3] == written(tmp_path / "two")[3]
    ours, theirs = (
        load_draft_model(tmp_path / name / "draft", dtype=torch.float32, device="cpu").state_dict()
        for name in ("two", "alone")
    )
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-2, rtol=1e-2, msg=lambda m, n=name: f"{n}: {m}")


def test_help_has_sections_in_the_order_of_the_work():
    lines = CliRunner().invoke(main, ["train", "--help"]).output.splitlines()
    headings = [line.rstrip(":") for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert headings == "Target and output,Texts,Drafter,Training,Optimizer,Loss,Machine and files".split(",")
    loss, machine = lines.index("Loss:"), lines.index("Machine and files:")
    flags = [line.split()[0] for line in lines[loss:machine] if line.startswith("  --")]
    assert flags[0] == "--ce-weight" and "--dpace-alpha" in flags and "--learning-rate" not in flags
