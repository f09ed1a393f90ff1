"""`doctor` on good and bad installations and pairs: what it says and how it ends."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_targets import written_target
from published_drafters import published_drafter
from quantised_drafter import gguf_drafter, quantised_drafter
from random_drafter import random_drafter
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.engine import start, support
from sglang_dspark.engine.hooks import all_hooks
from sglang_dspark.tools import doctor


@pytest.fixture
def broken(tmp_path: Path, draft: Path) -> Path:
    """A writable copy of the drafter, to be spoilt."""
    return Path(shutil.copytree(draft, tmp_path / "draft", copy_function=shutil.copyfile))


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the look at the plugin, which has tests of its own."""
    monkeypatch.setattr(doctor, "check_plugin", lambda: iter(()))


pytestmark = pytest.mark.usefixtures("unhooked")


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, edit) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.usefixtures("without_sglang")
def test_flags_that_a_start_changes_are_said(run, target, draft):
    result = run("doctor", "--target", target, "--draft", draft, "--", "--enable-pdmux", "--skip-server-warmup")
    said = " ".join(result.output.split())
    assert "note flags --enable-pdmux=True is dropped: DSPARK runs one batch at a time" in said
    assert "--skip-server-warmup=" not in said


@pytest.mark.usefixtures("without_sglang")
def test_another_sglang_is_read(run, tmp_path):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    result = run("doctor", "--sglang", tmp_path)
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    for hook in all_hooks():
        assert f"{hook.target} is gone; it was (" in said or f"{hook.target} is gone; it was async (" in said
    assert "0 are as in the release that is served" in said
    assert "name the folder of an unpacked wheel" in run("doctor", "--sglang", tmp_path / "sglang").output


@pytest.mark.slow
@pytest.mark.usefixtures("without_sglang")
def test_the_served_sglang_is_read(run):
    assert "0 break the plugin, 0 changed harmlessly, and 2 cannot be read" in run("doctor", "--sglang").output


@pytest.mark.usefixtures("without_sglang")
def test_hooks_of_a_plugin_that_cannot_be_imported(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_dspark.engine.start", None)
    monkeypatch.delattr("sglang_dspark.engine.start")
    result = run("doctor", "--hooks")
    assert result.exit_code == 1 and "the plugin cannot be imported: ModuleNotFoundError" in result.output


@pytest.mark.slow
def test_a_good_installation_and_the_golden_pair(run, target, draft, tmp_path):
    save_token_ids(tmp_path / "list.json", range(40))
    listed = ("--speculative-dspark-draft-vocabulary", tmp_path / "list.json")
    result = run("doctor", "--target", target, "--draft", draft, "--", *listed)
    assert result.exit_code == 0, result.output
    said = (
        "the drafter proposes 40 of the target's 256 tokens",
        f"sglang         {support.installed_sglang()}",
        "the plugin has loaded, and SGLang knows DSPARK and its flags",
        "DeepSpec format: 7 drafts per block, 2 layers, taps [0, 2, 4] of 6, vanilla Markov head of rank 32",
        "Qwen3ForCausalLM is served, and the drafter fits it: hidden size 128, vocabulary 256, 6 layers",
        "the plugin's worker decodes",
        "a server of this pair passes all checks that come before weights are loaded",
        f"DSPARK --speculative-draft-model-path {draft}",
    )
    assert [words for words in said if words not in result.output] == []


@pytest.mark.usefixtures("without_sglang")
def test_flags_that_sglang_does_not_know_are_named_in_one_line(run, target, draft, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "400")
    result = run("doctor", "--target", target, "--draft", draft, "--", "--no-such-flag")
    assert result.exit_code == 1
    assert "sglang.launch_server does not take these flags: unrecognized arguments: --no-such-flag" in result.output
    assert "usage" not in result.output + "".join(capfd.readouterr())


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(("on_gpu", "value"), [(False, "1"), (True, None)])
def test_a_start_is_tried_as_the_command_says(run, target, draft, monkeypatch, on_gpu, value):
    """SGLang reads the variable when it is imported, and takes the CPU for none without it."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    seen = []
    monkeypatch.setattr(doctor, "check_plugin", lambda: seen.append(os.environ.get("SGLANG_USE_CPU_ENGINE")) or ())
    run("doctor", "--target", target, "--draft", draft)
    assert seen == [value]


@pytest.mark.slow
def test_a_start_that_sglang_ends_is_told(run, target, tmp_path, monkeypatch):
    """SGLang seems to know the drafter's path: it reads the drafter's files then, and transformers misses a type."""
    drafter = published_drafter(tmp_path / "draft", "speculators")
    result = run("doctor", "--target", target, "--draft", drafter)
    assert result.exit_code == 0 and "speculators format" in result.output, result.output
    complete = start.complete

    def telling(args):
        args.speculative_draft_model_path = start.started(args).draft_path
        complete(args)

    monkeypatch.setattr(start, "complete", telling)
    result = run("doctor", "--target", target, "--draft", drafter)
    assert result.exit_code == 1 and "Ready" not in result.output
    said = " ".join(result.output.split())
    assert "SGLang ends the start: ValueError: Unrecognized model in" in said


@pytest.mark.usefixtures("without_sglang")
def test_a_cpu_without_the_stand_in(run, monkeypatch):
    monkeypatch.setattr(doctor.on_cpu, "stands_in", lambda: True)
    monkeypatch.setattr(doctor.on_cpu, "is_enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("doctor")
    assert result.exit_code == 1 and "run: sglang-dspark enable-cpu" in result.output
    monkeypatch.setattr(doctor.on_cpu, "is_enabled", lambda: True)
    assert "in place of its kernel package" in " ".join(run("doctor").output.split())


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(
    ("sides", "says"),
    [
        ("draft target", ("fail start", "is a drafter")),
        ("target target", ("fail start", "is a target")),
    ],
)
def test_the_wrong_side_of_a_pair_is_named(run, target, draft, sides, says):
    folders = {"target": target, "draft": draft}
    for_target, for_draft = (folders[side] for side in sides.split())
    result = run("doctor", "--target", for_target, "--draft", for_draft)
    assert result.exit_code == 1
    shown = " ".join(result.output.split())
    assert [words for words in says if words not in shown] == []


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_command_is_for_this_machine(run, target, draft, monkeypatch, on_gpu):
    for name in ("check_device", "check_versions"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(doctor, "check_pair", lambda target, draft, command: iter(()))
    command = run("doctor", "--target", target, "--draft", draft).output.splitlines()[-1]
    assert command.startswith("python" if on_gpu else "SGLANG_USE_CPU_ENGINE=1 python")
    assert ("--device cpu" in command) == (not on_gpu)


def _other_target(folder):
    edit_config(folder, num_target_layers=8)


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_other_target, "num_target_layers=8"),
        (
            lambda folder: edit_tensors(folder, lambda tensors: tensors["norm.weight"].fill_(float("nan"))),
            "NaN",
        ),
    ],
    ids=["of another target", "a NaN"],
)
def test_a_bad_drafter(run, target, broken, spoil, says):
    spoil(broken)
    result = run("doctor", "--target", target, "--draft", broken)
    assert (result.exit_code, says in result.output) == (1, True), result.output


@pytest.mark.usefixtures("without_sglang")
def test_quantised_drafters(run, target, draft, tmp_path):
    """Form, dtype, and sizes before and after."""
    quantised_drafter(draft, tmp_path / "draft", "pack-quantized")
    gguf_drafter(draft, tmp_path / "draft.gguf", "Q4_0")
    form = {"draft": "compressed-tensors pack-quantized (int4 by group of 16)", "draft.gguf": "GGUF Q4_0"}
    for name, words in form.items():
        result = run("doctor", "--target", target, "--draft", tmp_path / name)
        said = rf"stored as {re.escape(words)}, dequantised to \w+: \d\.\d MiB in the files, \d\.\d MiB loaded"
        assert re.search(said, " ".join(result.output.split())), result.output


@pytest.mark.usefixtures("without_sglang")
def test_switches_of_the_network(run, target, tmp_path):
    result = run("doctor", "--target", target, "--draft", random_drafter(tmp_path, "every-switch"))
    for words in (
        "6 slots of which the anchor's does not predict, window of 5 rows that slides along with",
        "heads for 60 of 256 tokens, RoPE of type yarn, factor 4, biases in the attention",
        "attention sinks in layers 1, 2, values times 0.7",
    ):
        assert words in result.output


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("GPT2LMHeadModel", "SGLang's own worker does not serve it either"),
        ("Llama4ForCausalLM", "['Llama4ForCausalLM'] is not served"),
    ],
)
def test_a_target_family_that_is_not_served(run, target, draft, tmp_path, architecture, says):
    other = Path(shutil.copytree(target, tmp_path / "target", copy_function=shutil.copyfile))
    edit_config(other, architectures=[architecture])
    result = run("doctor", "--target", other, "--draft", draft)
    assert says in " ".join(result.output.split())
    assert result.exit_code == 1


@pytest.mark.usefixtures("without_sglang")
def test_a_target_that_reads_images(run, tmp_path):
    """Its text has a configuration of its own, and tensors with other names."""
    target = written_target("Mistral3ForConditionalGeneration", tmp_path / "target")
    result = run("doctor", "--target", target, "--draft", random_drafter(tmp_path / "draft", "tiny"))
    said = " ".join(result.output.split())
    assert "Mistral3ForConditionalGeneration is served" in said and "hidden size 64, vocabulary 256, 5 layers" in said


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (
            "0.5.22",
            ("sglang 0.5.22 is installed", 'sglang >=0.5.23,<0.5.24; run: pip install "sglang>=0.5.23,<0.5.24"'),
        ),
        ("0.5.24", ("sglang 0.5.24 is installed", "or try this one with --speculative-dspark-untested-sglang")),
        (None, ('sglang is not installed; run: pip install "sglang>=0.5.23,<0.5.24"', "torch")),
    ],
)
def test_another_sglang_or_none(run, monkeypatch, version, says):
    def found(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(support, "version", found)
    result = run("doctor")
    assert result.exit_code == 1
    assert [words for words in says if words not in result.output] == []


def test_the_entry_point_is_gone(monkeypatch):
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    [finding] = doctor.check_plugin()
    assert (finding.status, finding.subject) == ("fail", "entry point")
    assert "sglang.srt.plugins do not list sglang_dspark.plugin:register" in finding.found
    assert "pip install --no-deps . in the repository" in finding.remedy


def test_the_user_lets_sglang_load_other_plugins_only(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "some, others")
    *_, registration = doctor.check_plugin()
    assert registration.status == "fail"
    assert "SGLANG_PLUGINS=some, others keeps the plugin out" in registration.found
    assert "add dspark" in registration.remedy


def test_a_target_alone_is_refused(run, target):
    result = run("doctor", "--target", target)
    assert result.exit_code == 2
    assert "give both or neither" in result.output


def test_flags_without_a_pair_are_refused(run):
    result = run("doctor", "--", "--enable-pdmux")
    assert (result.exit_code, "FLAGS (--enable-pdmux) are checked with a pair" in result.output) == (2, True)


@pytest.mark.usefixtures("without_sglang")
def test_every_patch_of_sglang_is_listed_with_its_reason(run, monkeypatch):
    [first, *_, last] = all_hooks()
    gone = replace(last, target=last.target + "_gone")
    monkeypatch.setattr(start, "all_hooks", lambda: (first, gone))
    monkeypatch.setenv("COLUMNS", "400")
    result = run("doctor", "--hooks")
    assert result.exit_code == 1
    assert f"hook {first.name}" in result.output
    assert f"{first.target} is there; it is patched (after, {first.where}): {first.reason}" in result.output
    assert f"has no attribute '{gone.target.rpartition('.')[2]}'" in result.output


def test_a_gpu_without_kernels(monkeypatch):
    properties = SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    finding = next(doctor.check_device())
    assert (finding.status, finding.found) == ("fail", "Tesla T4, 16 GiB, sm_75")
    assert "need 8.0" in finding.remedy
