"""Do drafters that their trainers wrote load, and draft here what they draft there?

    python benchmarks/trainers/compare.py
    python benchmarks/trainers/compare.py --only speculators

Each trainer is installed into a folder of its own, beside the packages of this environment. Among them, a script
``of_*.py`` writes tiny drafters of every kind with the trainer's own classes and functions, and what the trainer's
networks make of given hidden states of a target. The files are then read here. Exits with 1 if a file is
refused that the documents do not refuse, leaves a question open, or drafts otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from record import ANCHORS, RECORD
from safetensors.torch import load_file, safe_open
from torch import Tensor

from sglang_dspark.draft.formats import Reading, read
from sglang_dspark.draft.formats.description import describe
from sglang_dspark.draft.model import base_logits
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import CheckpointError
from sglang_dspark.tools import provenance

HERE = Path(__file__).parent
sys.path.append(str(provenance.REPOSITORY / "tests" / "support"))  # one request's decoding, spelled out

from reference_decoding import ContextKV, draft_block  # noqa: E402

TOLERANCE = 1e-4
FILES = provenance.REPOSITORY / "tests" / "data" / "trainer_files.json"
"""What tests read of some of the drafters, a line each: config.json, shapes, and the canonical configuration."""
OF_TESTS = {
    "speculators": ("dspark", "dspark, reduced vocabulary", "dspark, windows", "dflash", "dflash2", "dflash2, windows"),
    "SpecForge": ("dspark", "dspark, YaRN", "dflash", "dflash, windows"),
    "ModelOpt": ("dspark", "dspark, windows, causal", "dspark, sinks", "dflash"),
    "NeMo AutoModel": ("dspark", "dflash", "dflash2", "dflash2, windows"),
}
NOT_SERVED = "markov_head_type='rnn' with sample_from_anchor=false is not supported"


@dataclass(frozen=True)
class Trainer:
    """Packages, the trainer's own first, and the script that writes drafters with them."""

    packages: str
    script: str


TRAINERS = {
    "speculators": Trainer(
        "speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 pydantic-settings==2.16.3 python-dotenv==1.2.4 "
        "typing-inspection==0.4.5",
        "of_speculators.py",
    ),
    "SpecForge": Trainer("specforge==0.2.0", "of_specforge.py"),
    "ModelOpt": Trainer(  # with the newest transformers that it takes
        "nvidia-modelopt==0.47.0 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 pulp==3.3.2 transformers==5.14.1 "
        "tokenizers==0.22.2",
        "of_modelopt.py",
    ),
    "NeMo AutoModel": Trainer("nemo-automodel==0.7.0 torchao==0.18.0 torchdata==0.11.0", "of_nemo.py"),
}


def write_drafters(trainer: Trainer, folder: Path) -> None:
    """Install the trainer below ``folder`` unless it is there, and have it write its drafters into ``folder``."""
    packages = folder / "packages"
    if not packages.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *trainer.packages.split()], check=True)
    # Attention with masks is compiled otherwise, which takes minutes.
    environment = os.environ | {"PYTHONPATH": str(packages), "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, str(HERE / trainer.script), str(folder / "drafters")], env=environment, check=True)


def compared(folder: Path) -> dict[str, Any]:
    """Return what was read of the drafter in ``folder``, and how far its drafts are from its trainer's."""
    try:
        reading = read(folder)
    except CheckpointError as error:
        return {"refused": str(error).replace(f"{folder}/", "")}
    questions = [remark.sentence for remark in reading.remarks if remark.doubtful]
    found = {"format": reading.format, "network": describe(reading.config), "questions": questions}
    return found | _differences(folder, reading, load_file(folder / RECORD))


@torch.no_grad()
def _differences(folder: Path, reading: Reading, record: dict[str, Tensor]) -> dict[str, Any]:
    model = load_draft_model(folder, dtype=torch.float32, device="cpu")
    model.bind_target(record["embed"], record["lm_head"])
    features = torch.cat([record["target_hidden"][tap + 1] for tap in reading.config.target_layer_ids], dim=-1)
    worst = {"logits": 0.0, "confidence": 0.0}
    equal = 0
    for row, anchor in enumerate(ANCHORS):
        context = ContextKV(model)
        context.append(features[:anchor])
        block = draft_block(model, context, int(record["ids"][anchor]))
        here = {"logits": base_logits(block.hidden, model.lm_head_weight, model.config)}
        if "confidence" in record and block.confidence_logits is not None:
            here["confidence"] = block.confidence_logits
        for name, tensor in here.items():
            worst[name] = max(worst[name], float((tensor - record[name][row]).abs().max()))
        equal += block.tokens == record["tokens"][row].tolist()
    return {
        "worst_difference": {name: float(f"{value:.2g}") for name, value in worst.items() if name in record},
        "largest_logit": round(float(record["logits"].abs().max()), 2),
        "equal_blocks": f"{equal} of {len(ANCHORS)}",
    }


def kept_file(trainer: str, folder: Path) -> str:
    """Return a line of :data:`FILES`."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = "target"
    line = {"trainer": trainer, "drafter": folder.name, "config": config, "shapes": shapes}
    return json.dumps(line | {"read": read(folder).config.to_dict()})


def passes(case: dict[str, Any]) -> bool:
    """Return whether a drafter is read without a question and drafts as its trainer's network, or may be refused."""
    if "refused" in case:
        return NOT_SERVED in case["refused"]
    close = all(value < TOLERANCE for value in case["worst_difference"].values())
    return close and case["equal_blocks"] == f"{len(ANCHORS)} of {len(ANCHORS)}" and not case["questions"]


@click.command()
@click.option("--only", type=click.Choice(list(TRAINERS)), multiple=True, help="A trainer. Default: all of them.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("results/trainers"), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Default: trainers.json beside the folder.")
@click.option("--keep-files", is_flag=True, help=f"Write {FILES.name} anew, for the tests.")
def main(only: tuple[str, ...], folder: Path, output: Path | None, keep_files: bool) -> None:
    """Install trainers, have them write drafters, and compare."""
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    files: list[str] = []
    for name in only or TRAINERS:
        place = (folder / name.replace(" ", "_")).resolve()
        write_drafters(TRAINERS[name], place)
        drafters = sorted(path for path in place.glob("drafters/*") if path.name != "target")
        found = {drafter.name: compared(drafter) for drafter in drafters}
        cases[name] = {"packages": TRAINERS[name].packages, "drafters": found}
        files += [kept_file(name, place / "drafters" / drafter) for drafter in OF_TESTS[name]]
    failed = False
    for name, trainer in cases.items():
        for drafter, case in trainer["drafters"].items():
            failed |= not passes(case)
            said = case.get("refused") or f"{case['worst_difference']}, {case['equal_blocks']} blocks equal"
            print(f"{'ok  ' if passes(case) else 'FAIL'} {name}: {drafter}: {said}")
            for question in case.get("questions", ()):
                print(f"     {question}")
    if keep_files:
        FILES.write_text("[" + ",\n".join(files) + "]\n")
    provenance.write_json(output or folder.with_suffix(".json"), provenance.record() | {"trainers": cases})
    sys.exit(failed)


if __name__ == "__main__":
    main()
