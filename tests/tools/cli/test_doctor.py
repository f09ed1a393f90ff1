"""`doctor` on good and bad installations and pairs: what it says and how it ends."""

import json
import os
import re
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_targets import written_target
from published_drafters import published_drafter
from random_drafter import random_drafter
from safetensors.torch import load_file, save_file

from sglang_dspark.engine import support
from sglang_dspark.engine.launch import diagnosis, hooks
from sglang_dspark.engine.launch.hooks import HOOKS
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.tools.doctor import installation, models
from sglang_dspark.tools.doctor.finding import Finding


@pytest.fixture
def broken(tmp_path: Path, draft: Path) -> Path:
    """A writable copy of the drafter, to be spoilt."""
    return Path(shutil.copytree(draft, tmp_path / "draft", copy_function=shutil.copyfile))


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what imports SGLang; those checks have tests of their own."""
    monkeypatch.setattr(installation, "check_plugin", lambda: iter(()))
    monkeypatch.setattr(models, "check_start", lambda command: Finding("ok", "start", "not looked at"))


@pytest.fixture
def without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a start from patching SGLang in this process, and from leaving variables behind."""
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION"):
        monkeypatch.setenv(name, "0")


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, edit) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.slow
@pytest.mark.usefixtures("without_traces")
def test_a_good_installation_and_the_golden_pair(run, target, draft):
    result = run("doctor", "--target", target, "--draft", draft)
    assert result.exit_code == 0, result.output
    assert f"sglang         {support.installed_sglang()}" in result.output
    assert "DSPARK and its flags are known to SGLang in this process" in result.output
    assert (
        "DeepSpec format: 7 drafts per block, 2 layers, taps [0, 2, 4] of 6, vanilla Markov head of rank 32"
        in result.output
    )
    assert "Qwen3ForCausalLM: hidden size 128, vocabulary 256, 6 layers" in result.output
    assert "plugin: our worker serves the target" in result.output
    assert "passed: device, target family, " in result.output
    assert "SGLang takes the arguments of the command below" in result.output
    [others] = [line for line in result.output.splitlines() if "the server also checks, with its flags: " in line]
    assert "window of the drafter" in others and "fallback of nodes" in others
    assert f"DSPARK --speculative-draft-model-path {draft}" in result.output


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(("on_gpu", "value"), [(False, "1"), (True, None)])
def test_a_start_is_tried_as_the_command_says(run, target, draft, monkeypatch, on_gpu, value):
    """SGLang reads the variable when it is imported, and takes the CPU for none without it."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    seen = []
    monkeypatch.setattr(
        installation, "check_plugin", lambda: seen.append(os.environ.get("SGLANG_USE_CPU_ENGINE")) or ()
    )
    run("doctor", "--target", target, "--draft", draft)
    assert seen == [value]


@pytest.mark.slow
@pytest.mark.usefixtures("without_traces")
def test_a_start_that_sglang_ends_is_told(run, target, tmp_path, monkeypatch):
    """As if SGLang knew the drafter's path: it reads the drafter's files then, and transformers knows no such type."""
    drafter = published_drafter(tmp_path / "draft", "speculators")
    result = run("doctor", "--target", target, "--draft", drafter)
    assert result.exit_code == 0 and "speculators format" in result.output, result.output
    after = Launch.after

    def telling(launch, args):
        args.speculative_draft_model_path = launch.draft_path
        after(launch, args)

    monkeypatch.setattr(Launch, "after", telling)
    result = run("doctor", "--target", target, "--draft", drafter)
    assert result.exit_code == 1 and "Ready" not in result.output
    said = " ".join(result.output.split())
    assert "SGLang ends the start of such a server: ValueError: The checkpoint you are trying to load" in said


@pytest.mark.slow
@pytest.mark.usefixtures("without_traces")
@pytest.mark.parametrize(("random", "says"), [(False, "ok +drafts "), (True, "fail +drafts ")])
def test_prompts_show_whether_the_drafter_predicts_the_target(run, target, draft, tmp_path, random, says):
    if random:
        edit_tensors(broken := shutil.copytree(draft, tmp_path / "draft", copy_function=shutil.copyfile), _randomise)
        draft = broken
    prompts = tmp_path / "prompts.jsonl"
    texts = [
        f"{start} {end}"
        for start in ("if the dog", "the dark cloud", "the stone", "a red lamp")
        for end in ("is", "sees")
    ]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    result = run("doctor", "--target", target, "--draft", draft, "--prompts", prompts)
    assert result.exit_code == random, result.output
    assert re.search(says, result.output), result.output
    assert ("hardly predicts this target" in " ".join(result.output.split())) == random


def _randomise(tensors):
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()


@pytest.mark.usefixtures("without_sglang")
def test_a_cpu_without_the_stand_in(run, monkeypatch):
    monkeypatch.setattr(installation.on_cpu, "stands_in", lambda: True)
    monkeypatch.setattr(installation.cpu_environment, "is_enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("doctor")
    assert result.exit_code == 1 and "run: sglang-dspark enable-cpu" in result.output
    monkeypatch.setattr(installation.cpu_environment, "is_enabled", lambda: True)
    assert "stands in for SGLang's kernel package" in " ".join(run("doctor").output.split())


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(
    ("sides", "says"),
    [
        ("draft target", ("fail drafter --draft: ", "is a target, not a drafter", "is a drafter: the two are swapped")),
        ("target target", ("fail drafter --draft: ", "is a target, not a drafter")),
        ("draft draft", ("fail target --target=", "is a drafter", "give the model that it was trained for")),
    ],
)
def test_the_wrong_side_of_a_pair_is_named(run, target, draft, sides, says):
    folders = {"target": target, "draft": draft}
    for_target, for_draft = (folders[side] for side in sides.split())
    result = run("doctor", "--target", for_target, "--draft", for_draft)
    assert result.exit_code == 1
    shown = " ".join(result.output.split())
    assert [words for words in says if words not in shown] == []
    assert ("swapped" in result.output) == (sides == "draft target")


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_command_is_for_this_machine(run, target, draft, monkeypatch, on_gpu):
    for name in ("check_device", "check_versions"):
        monkeypatch.setattr(installation, name, lambda: iter(()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(models, "check_pair", lambda target, draft: iter(()))
    command = run("doctor", "--target", target, "--draft", draft).output.splitlines()[-1]
    assert command.startswith("python" if on_gpu else "SGLANG_USE_CPU_ENGINE=1 python")
    assert ("--device cpu" in command) == (not on_gpu)


@pytest.mark.usefixtures("without_sglang")
def test_a_drafter_of_another_target(run, target, broken):
    edit_config(broken, num_target_layers=8)
    result = run("doctor", "--target", target, "--draft", broken)
    assert result.exit_code == 1
    assert "num_target_layers=8, but the target has num_hidden_layers=6" in result.output


@pytest.mark.usefixtures("without_sglang")
def test_switches_of_the_network(run, target, draft, tmp_path):
    result = run("doctor", "--target", target, "--draft", draft)
    assert "none: the network is DeepSpec's" in result.output
    result = run("doctor", "--target", target, "--draft", random_drafter(tmp_path, "every-switch"))
    assert result.exit_code == 0, result.output
    for words in (
        "layout: 6 slots of which the anchor's does not predict; window: window of 5 rows that slides along with",
        "reduced vocabulary: heads for 60 of 256 tokens; RoPE: RoPE of type yarn, factor 4; bias: biases in the",
        "sinks: attention sinks in layers 1, 2; value scale: values times 0.7",
    ):
        assert words in result.output


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(
    ("architecture", "on_gpu", "says"),
    [
        (
            "GPT2LMHeadModel",
            False,
            "fail engine scheduled: the plugin's worker does not serve GPT2LMHeadModel: this plugin",
        ),
        (
            "GPT2LMHeadModel",
            True,
            "note engine scheduled: the plugin's worker does not serve GPT2LMHeadModel: this plugin",
        ),
        ("Llama4ForCausalLM", False, "target architecture ['Llama4ForCausalLM'] is not served with DSPARK"),
    ],
)
def test_a_target_family_that_is_not_served(run, target, draft, tmp_path, monkeypatch, architecture, on_gpu, says):
    """SGLang's own worker may serve some."""
    other = Path(shutil.copytree(target, tmp_path / "target", copy_function=shutil.copyfile))
    edit_config(other, architectures=[architecture])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(installation, "check_device", lambda: iter(()))
    result = run("doctor", "--target", other, "--draft", draft)
    assert says in " ".join(result.output.split())
    assert result.exit_code == (0 if says.startswith("note") else 1)


@pytest.mark.usefixtures("without_sglang")
def test_a_target_that_reads_images(run, tmp_path):
    """Its text has a configuration of its own, and tensors with other names."""
    target = written_target("Mistral3ForConditionalGeneration", tmp_path / "target")
    result = run("doctor", "--target", target, "--draft", random_drafter(tmp_path / "draft", "tiny"))
    assert "Mistral3ForConditionalGeneration: hidden size 64, vocabulary 256, 5 layers" in result.output


@pytest.mark.usefixtures("without_sglang")
def test_a_missing_tensor(run, target, broken):
    edit_tensors(broken, lambda tensors: tensors.pop("fc.weight"))
    result = run("doctor", "--target", target, "--draft", broken)
    assert result.exit_code == 1
    assert "missing fc.weight [128, 384]" in result.output


@pytest.mark.usefixtures("without_sglang")
def test_a_tensor_with_a_nan(run, target, broken):
    edit_tensors(broken, lambda tensors: tensors["norm.weight"].fill_(float("nan")))
    result = run("doctor", "--target", target, "--draft", broken)
    assert result.exit_code == 1
    assert "NaN or infinite values in norm.weight" in result.output


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.5.22", 'drives sglang >=0.5.23,<0.5.24: pip install "sglang>=0.5.23,<0.5.24"'),
        ("0.5.24", "or try this one with --speculative-dspark-untested-sglang"),
    ],
)
def test_another_sglang(run, monkeypatch, version, says):
    monkeypatch.setattr(support, "version", lambda name: version)
    result = run("doctor")
    assert result.exit_code == 1
    assert f"sglang {version} is installed" in result.output
    assert says in result.output


def test_sglang_missing(run, monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(support, "version", missing)
    result = run("doctor")
    assert result.exit_code == 1
    assert 'sglang is not installed; run: pip install "sglang>=0.5.23,<0.5.24"' in result.output
    assert "torch" in result.output


def test_the_entry_point_is_gone(monkeypatch):
    monkeypatch.setattr(installation, "entry_points", lambda group: [])
    assert list(installation.check_plugin()) == [
        Finding(
            "fail",
            "entry point",
            "sglang.srt.plugins does not list sglang_dspark.plugin:register",
            "pip install . in the repository",
        )
    ]


def test_the_user_lets_sglang_load_other_plugins_only(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "some, others")
    *_, registration = installation.check_plugin()
    assert registration.status == "fail"
    assert "SGLANG_PLUGINS=some, others keeps the plugin out" in registration.found
    assert "add dspark" in registration.remedy


def test_a_target_alone_is_refused(run, target):
    result = run("doctor", "--target", target)
    assert result.exit_code == 2
    assert "give both or neither" in result.output


@pytest.mark.usefixtures("without_sglang")
def test_every_patch_of_sglang_is_listed_with_its_reason(run, monkeypatch):
    gone = replace(HOOKS[-1], target=HOOKS[-1].target + "_gone")
    monkeypatch.setattr(diagnosis, "all_hooks", lambda: (HOOKS[0], gone))
    monkeypatch.setenv("COLUMNS", "400")
    result = run("doctor", "--hooks")
    assert result.exit_code == 1
    assert f"hook {HOOKS[0].name}" in result.output
    assert f"{HOOKS[0].where}, after {HOOKS[0].target}: {HOOKS[0].reason}" in result.output
    assert f"has no attribute '{gone.target.rpartition('.')[2]}'" in result.output


def test_a_gpu_without_kernels(monkeypatch):
    properties = SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    finding = next(installation.check_device())
    assert (finding.status, finding.found) == ("fail", "Tesla T4, 16 GiB, sm_75")
    assert "need 8.0" in finding.remedy
