"""Tests of ``python -m sglang_dspark train`` on the golden target, given a chat template, and of its options."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from dspark_training import command, pipeline
from dspark_training.command import train
from dspark_training.options import Flag, SectionedCommand, settings_options, taken
from dspark_training.settings import TextPlan, TrainConfig
from dspark_training.target import Target
from dspark_training.trainer import Trainer
from msgspec import Meta
from rich.console import Console

from sglang_dspark.declared import int_range
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.cli import main

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "target"
# A turn is "the ... ." and the answer goes on after another "the", as in the text that this target was trained on.
TEMPLATE = "{% for m in messages %}the {{ m.content }} . {% endfor %}{% if add_generation_prompt %}the{% endif %}"
NOUNS = "cat dog bird fish tree river stone house boat lamp".split()
SMALL_TEXTS = (
    *("--max-tokens", 12, "--max-prompt-tokens", 16, "--held-out", 3, "--steps", 6),
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
    turns = [[f"red {noun} sees the blue {noun}"] for noun in NOUNS[:-1]]
    turns.append(["red lamp sees the \ud83d", "blue \ud83d lamp"])  # texts that were cut within a letter
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    return path


@pytest.fixture
def train_here(chat_target, prompts, tmp_path, monkeypatch):
    """``train("name", *options)`` works in ``tmp_path / "name"`` and gives the finished command."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(name, *options, target=chat_target, prompts=("--prompts", prompts), small=SMALL):
        AcceleratorState._reset_state(reset_partial_state=True)  # one precision per process, and each run has its own
        fixed = ("train", "--target", target, "--output", tmp_path / name, *prompts, "--device", "cpu")
        return CliRunner().invoke(main, [str(argument) for argument in (*fixed, *small, *options)])

    return run


@pytest.mark.slow
def test_prompts_from_a_file_and_invented_ones_become_a_measured_drafter(train_here, tmp_path, chat_target):
    result = train_here("run", "--invent", 6)
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
def test_an_interrupted_run_and_the_texts_of_another_one(train_here, tmp_path, monkeypatch):
    """The same command goes on after the last checkpoint, and another drafter reads the texts that are there."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_on", dying_in_call(5, Trainer._train_on))
        assert train_here("run", "--max-tokens", 13).exit_code == 1
    result = train_here("run", "--max-tokens", 13)
    assert result.exit_code == 0, result.output
    assert "continuing after step 4" in result.output
    corpus = tmp_path / "run" / "corpus"
    # Not given again: the texts keep the plan they were begun with.
    options = ("--corpus", corpus, "--taps", "0,3", "--head", "rnn", "--layers", 2, "--no-confidence-head")
    small = [option for option in SMALL if option not in ("--max-tokens", 12)]
    result = train_here("second", *options, "--own-embeddings", "--dtype", "bfloat16", "--store-states", small=small)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "second" / "corpus").exists()
    model = load_draft_model(tmp_path / "second/draft", dtype=torch.float32, device="cpu")
    assert model.embed_tokens is not None and model.lm_head is not None and model.confidence_head is None
    assert (model.config.markov_head_type, model.config.num_hidden_layers) == ("rnn", 2)


def dying_in_call(number, function):
    calls = []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*arguments)

    return dies


@pytest.mark.slow
def test_losses_schedules_and_vocabularies_are_options(train_here, tmp_path):
    options = ("--schedule", "linear", "--tv-weight", 0, "--ce-weight", 1)
    result = train_here("run", *options, "--draft-vocabulary", 20, "--patience", 1, "--gradient-accumulation", 2)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "training_settings.json").read_text())
    assert (config["schedule"], config["gradient_accumulation"], config["draft_vocabulary"]) == ("linear", 2, 20)
    assert (config["loss"]["ce"], config["loss"]["l1"]) == (1.0, 0.0)
    assert len(json.loads((tmp_path / "run/draft/draft_vocabulary.json").read_text())["token_ids"]) == 20


@pytest.mark.slow
def test_a_missing_library_is_named_with_the_extra_that_has_it(train_here, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "accelerate" else name)
    result = train_here("run")
    assert result.exit_code == 1
    assert 'train needs accelerate: pip install "sglang-dspark[train]"' in result.output


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_train_one_drafter(tmp_path, chat_target, prompts):
    """The whole command under torchrun: the first process writes and speaks, the other waits and trains along."""
    fixed = ("train", "--target", chat_target, "--output", tmp_path / "two", "--prompts", prompts, "--device", "cpu")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = [str(argument) for argument in (*launcher, "-m", "sglang_dspark", *fixed, *SMALL)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=240, env=env)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("Accept length on held-out texts") == 1
    assert run.stdout.count("parameters to train") == 1
    assert load_draft_model(tmp_path / "two" / "draft", dtype=torch.float32, device="cpu").config.gamma == 3


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_from_a_drafter_takes_its_shape(train_here, tmp_path):
    assert train_here("first", "--rank", 4, "--layers", 2, "--taps", "0,3").exit_code == 0
    options = ("--corpus", tmp_path / "first" / "corpus", "--init", tmp_path / "first" / "draft")
    result = train_here("second", *options, "--head", "gated", small=SMALL_TEXTS)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "second/draft/config.json").read_text())
    assert [config[name] for name in ("block_size", "markov_rank", "num_hidden_layers")] == [3, 4, 2]
    assert (config["target_layer_ids"], config["markov_head_type"]) == ([0, 3], "gated")
    (ours, total) = re.search(r"(\d+) of (\d+) tensors are those of", result.output).groups()
    assert int(ours) == int(total) - 2
    assert "drawn: markov_head.gate_proj.bias, markov_head.gate_proj.weight" in result.output


REFUSED = {
    "more held out than there is": (("--held-out", 10), "--held-out 10: of 10 prompts, 10 are distinct"),
    "no list": (("--taps", "1;2"), "'1;2' is not a list of numbers such as 1,2,3"),
    "no JSON": (("--chat-template-kwargs", "thinking"), "'thinking' is not a JSON object"),
    "a stop token as mask": (("--mask-token-id", 1), "--mask-token-id 1 ends an answer; drop the flag"),
    "a written token as mask": (("--mask-token-id", 33), "times in the answers"),
    "a mask outside": (("--mask-token-id", 256), "--mask-token-id 256 is not in the vocabulary of 256"),
    "a silent server": (("--server", "http://127.0.0.1:9"), "check that an SGLang server is running there"),
    "invented raw prompts": (("--raw", "--invent", 4), "with --raw, give --prompts instead"),
    "a device that is not there": (("--device", "cuda"), "finds no GPU; give --device cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.slow
def test_refusals_name_the_option_and_the_remedy(case, train_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options, says = REFUSED[case]
    result = train_here("run", *options)
    assert result.exit_code != 0
    assert says in result.output


@pytest.mark.slow
def test_taps_are_checked_before_the_target_is_loaded(train_here, monkeypatch):
    monkeypatch.setattr(Target, "from_pretrained", None)
    result = train_here("run", "--taps", "1,5")
    assert result.exit_code == 1
    assert "target_layer_ids=[1, 5] must be strictly increasing in [-1, 4]" in result.output


@pytest.mark.slow
def test_a_target_that_is_not_there_or_has_no_chat_template(train_here):
    result = train_here("run", target="/nowhere/model")
    assert (result.exit_code, "--target /nowhere/model: there is no such folder" in result.output) == (1, True)
    result = train_here("run", target=GOLDEN)
    assert (result.exit_code, "its tokenizer has no chat template; give --raw" in result.output) == (1, True)
    # What was refused left nothing behind that a second try would have to agree with.
    assert train_here("run", "--raw", target=GOLDEN).exit_code == 0


@pytest.mark.slow
def test_a_file_gets_a_line_now_and_then_and_a_terminal_none(monkeypatch):
    """A bar is drawn only on terminals; hours without a word look like a program that hangs."""
    clock = iter([0.0, 1.0, 29.0, 31.0, 32.0])
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=200)
    display = pipeline.Display(console)
    for done in range(4):
        display.progress("training", done, 10, "loss 2.0")
    display.progress("measuring", 0, 5)
    assert console.file.getvalue().splitlines() == [
        "training: 0 of 10 loss 2.0",
        "training: 3 of 10 loss 2.0",
        "measuring: 0 of 5",
    ]


# What the command decides from other options, or from the target, where the user does not say.
DECIDED = {"invent", "compute_dtype", "mask_token_id"}


@dataclass
class Shape:
    size: Annotated[int, int_range(1, 8), Flag("How wide.", "width")] = 3
    share: Annotated[float, Meta(gt=0, lt=1), Flag("How much.")] = 0.5
    form: Annotated[Literal["round", "square"], Flag("Which.")] = "round"
    depth: Annotated[int, int_range(0), Flag("How deep.")] | None = None
    sides: Annotated[tuple[Annotated[int, int_range(1)], ...], Flag("How long.")] = (1, 2)
    filled: Annotated[bool, Flag("Whether there is something in it.")] = True
    hidden: int = 1


@click.command(cls=SectionedCommand)
@click.option("--other", is_flag=True, help="Of no configuration.")
@settings_options(Shape, "Shape")
def shape(other, **options):
    click.echo(Shape(**taken(Shape, options)))


def run(*arguments):
    return CliRunner().invoke(shape, arguments)


def test_an_option_has_the_default_of_its_field():
    assert run().output.strip() == str(Shape())
    options = ("--width", "8", "--share", "0.1", "--form", "square", "--depth", "0", "--sides", "4,5", "--no-filled")
    assert run(*options).output.strip() == str(Shape(8, 0.1, "square", 0, (4, 5), filled=False))


def test_the_help_has_a_heading_for_every_configuration():
    help_text = run("--help").output
    own, of_shape = help_text.split("\nShape:\n")
    assert "--other" in own
    assert "--width" in of_shape and "[default: 3; 1<=x<=8]" in of_shape
    assert "hidden" not in help_text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--width", "0"),
        ("--width", "9"),
        ("--share", "0"),
        ("--share", "1"),
        ("--form", "flat"),
        ("--depth", "-1"),
        ("--sides", "1,0"),
        ("--sides", "1,x"),
    ],
)
def test_an_option_has_the_bounds_of_its_field(option, value):
    result = run(option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_options_that_another_configuration_takes_are_left_to_it():
    @dataclass
    class Other:
        form: str

    assert taken(Shape, {"size": 1, "form": "round", "colour": "red"}, but=Other) == {"size": 1}


@pytest.mark.parametrize(("command", "config", "least"), [(train, TrainConfig, 12), (train, TextPlan, 8)])
def test_commands_and_configurations_have_the_same_defaults(command, config, least):
    defaults = {field.name: field.default for field in fields(config)}
    options = {option.name for option in command.params} & defaults.keys() - DECIDED
    assert len(options) >= least
    with command.make_context("command", ["--target", "t", "--output", "o"]) as context:
        for name in options:
            expected = defaults[name]
            if not isinstance(expected, int | float | str | tuple | None):
                continue  # made by a factory
            assert context.params[name] == expected, name
