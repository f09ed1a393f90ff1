"""What the walk through docs/training.md reads beside the commands that it runs."""

import os
import re
from pathlib import Path

import pytest
from train_walk import CPU_OPTIONS, split_prompts, stages_of

from sglang_dspark.errors import DSparkError


def test_what_is_measured_was_not_trained_on(tmp_path):
    lines = [f'{{"turns": ["question {i}"]}}' for i in range(7)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines) + "\n")
    trained, measured = split_prompts(tmp_path / "all.jsonl", tmp_path, 4, 2)
    assert trained.read_text().splitlines() == lines[:4]
    assert measured.read_text().splitlines() == lines[4:6]
    with pytest.raises(DSparkError, match="7 prompts; give 8 or more"):
        split_prompts(tmp_path / "all.jsonl", tmp_path, 4, 4)


def test_stages_end_with_the_last_text_the_last_step_and_the_command(tmp_path):
    times = {"corpus/train/shard-00000.safetensors": 130, "corpus/held-out/shard-00000.safetensors": 150}
    for name, changed in {**times, "training_state.pt": 400}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (changed, changed))
    assert stages_of(tmp_path, 100, 420.04) == {"texts": 50, "training": 250, "measuring": 20.0}


def test_the_options_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (command,) = re.findall(r"^### On a CPU\n.*?```bash\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    words = command.replace("\\\n", "").replace("--invent 500", "").split()
    assert words[words.index("--dtype") :] == CPU_OPTIONS.split()
