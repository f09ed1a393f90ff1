"""Replay of golden vectors: does this package compute what the checkpoint's own implementation computed?

A golden directory holds ``golden.json`` (greedy decodes: prompts, outputs, and every round's draft and accept count)
and optionally ``golden.safetensors`` (hidden states and logits of some rounds, ``c{case}.r{round}.{name}``). Each case
is run twice in float32: *taught*, where every round starts from the recorded history, and *decoded*, where the package
decodes alone. A wrong round shows on its own in the former; an error that builds up shows in the latter.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.pairing import check_dimensions
from sglang_dspark.draft.reference import (
    ContextKV,
    ReferenceBlock,
    Target,
    accept_greedy,
    decode_greedy,
    draft_block,
)
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import CheckpointError

TENSOR_ATOL = 1e-4  # absolute; both sides are float32, only the order of summation differs

_TENSORS: Mapping[str, Callable[[ReferenceBlock], Tensor | None]] = {
    "block_hidden": lambda block: block.hidden,
    "base_logits": lambda block: block.base_logits,
    "logits": lambda block: block.logits,
    "confidence_logits": lambda block: block.confidence_logits,
}


@dataclass(frozen=True)
class Mismatch:
    """One difference. ``path`` is ``taught.<what>`` or ``decoded.<what>``; ``round`` is None for whole outputs."""

    path: str
    case: int
    round: int | None
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = f"case {self.case}" + ("" if self.round is None else f" round {self.round}")
        return f"{self.path} ({where}): expected {self.expected}, got {self.got}"


@dataclass
class GoldenReport:
    """The numbers compared and their differences."""

    checked: Counter[str] = field(default_factory=Counter)  # path -> number of comparisons
    mismatches: list[Mismatch] = field(default_factory=list)
    max_abs_error: dict[str, float] = field(default_factory=dict)  # tensor path -> largest difference seen
    accept_lengths: list[float] = field(default_factory=list)  # per case, of this package's own decode

    @property
    def ok(self) -> bool:
        """Return whether something was compared and nothing differed."""
        return bool(self.checked) and not self.mismatches

    def equal(self, path: str, case: int, round: int | None, expected: Any, got: Any) -> None:
        """Count one exact comparison."""
        self.checked[path] += 1
        if expected != got:
            self.mismatches.append(Mismatch(path, case, round, expected, got))

    def close(self, path: str, case: int, round: int, expected: Tensor, got: Tensor | None) -> None:
        """Count one tensor comparison to :data:`TENSOR_ATOL`."""
        self.checked[path] += 1
        if got is None or got.shape != expected.shape:
            found = "nothing" if got is None else f"shape {list(got.shape)}"
            self.mismatches.append(Mismatch(path, case, round, f"shape {list(expected.shape)}", found))
            return
        error = float((got.double() - expected.double()).abs().max())
        self.max_abs_error[path] = max(error, self.max_abs_error.get(path, 0.0))
        if not error <= TENSOR_ATOL:  # a NaN must not pass
            within = f"within {TENSOR_ATOL:g} of the recorded tensor"
            self.mismatches.append(Mismatch(path, case, round, within, f"a difference of {error:.3g}"))


class GoldenRound(msgspec.Struct, frozen=True):
    """One recorded round; ``start`` is the absolute position of the anchor."""

    start: int
    anchor: int
    draft: list[int]
    accepted: int


class GoldenCase(msgspec.Struct, frozen=True):
    """One recorded request."""

    prompt_ids: list[int]
    output_ids: list[int]
    rounds: list[GoldenRound]


class Golden(msgspec.Struct):
    """The content of a golden directory.

    Attributes:
        tensors: (case, round) -> name -> [gamma, ...] float32; not in the JSON file.
    """

    temperature: float
    gamma: int
    max_new_tokens: int
    stop_token_ids: list[int]
    cases: list[GoldenCase]
    tensors: dict[tuple[int, int], dict[str, Any]] = msgspec.field(default_factory=dict)

    def ends_at_limit(self, case: GoldenCase, golden_round: GoldenRound) -> bool:
        """Return whether a round reached the token limit: recorders may cut its accept count."""
        return golden_round.start + golden_round.accepted + 1 >= len(case.prompt_ids) + self.max_new_tokens


def replay(target_dir: str | Path, draft_dir: str | Path, golden_dir: str | Path | None = None) -> GoldenReport:
    """Run target and draft over the golden data in float32 on the CPU and compare.

    Drafts, accept counts and output ids must be equal, tensors within :data:`TENSOR_ATOL`.

    Args:
        target_dir: the target checkpoint, in a form that transformers' ``AutoModelForCausalLM`` loads.
        draft_dir: the draft checkpoint.
        golden_dir: where golden.json lies; default: ``draft_dir``.

    Raises:
        CheckpointError: a checkpoint cannot be loaded, draft and target do not fit, or the golden data is malformed.
    """
    model = load_draft_model(draft_dir, dtype=torch.float32, device="cpu")
    golden = load_golden(draft_dir if golden_dir is None else golden_dir, model.config)
    target = load_target(target_dir, model)
    report = GoldenReport()
    with torch.no_grad():
        for index, case in enumerate(golden.cases):
            _replay_taught(report, model, target, golden, index)
            decoded = decode_greedy(
                model,
                target,
                case.prompt_ids,
                max_new_tokens=golden.max_new_tokens,
                stop_token_ids=golden.stop_token_ids,
            )
            report.accept_lengths.append(decoded.accept_length)
            report.equal("decoded.output_ids", index, None, case.output_ids, decoded.output_ids)
            report.equal("decoded.rounds", index, None, len(case.rounds), len(decoded.rounds))
            for number, (expected, got) in enumerate(zip(case.rounds, decoded.rounds, strict=False)):
                report.equal("decoded.start", index, number, expected.start, got.start)
                report.equal("decoded.anchor", index, number, expected.anchor, got.anchor)
                report.equal("decoded.draft", index, number, expected.draft, got.block.tokens)
                if not golden.ends_at_limit(case, expected):
                    report.equal("decoded.accepted", index, number, expected.accepted, got.accepted)
    return report


def _replay_taught(report: GoldenReport, model: DraftModel, target: Target, golden: Golden, index: int) -> None:
    case = golden.cases[index]
    ids = case.prompt_ids + case.output_ids
    _, features = target(ids)
    context = ContextKV(model)
    for number, expected in enumerate(case.rounds):
        context.append(features[context.length : expected.start])
        report.equal("taught.anchor", index, number, expected.anchor, ids[expected.start])
        block = draft_block(model, context, expected.anchor)
        report.equal("taught.draft", index, number, expected.draft, block.tokens)
        for name, tensor in golden.tensors.get((index, number), {}).items():
            report.close(f"taught.{name}", index, number, tensor, _TENSORS[name](block))
        if golden.ends_at_limit(case, expected):
            continue
        logits, _ = target([*ids[: expected.start + 1], *expected.draft])
        accepted, _ = accept_greedy(logits[expected.start :], expected.draft, golden.stop_token_ids)
        report.equal("taught.accepted", index, number, expected.accepted, accepted)


def load_golden(golden_dir: str | Path, config: DraftConfig) -> Golden:
    """Read and check a golden directory against the draft it belongs to.

    Raises:
        CheckpointError: a file is absent, damaged, of another draft, or refers to rounds that it does not hold.
    """
    file = Path(golden_dir) / "golden.json"
    try:
        golden = msgspec.json.decode(file.read_bytes(), type=Golden)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file}: not golden data ({error!r}); give a directory with golden.json") from error
    if golden.temperature != 0:
        raise CheckpointError(
            f"{file}: temperature={golden.temperature!r}; only greedy data (temperature 0) can be replayed"
        )
    if golden.gamma != config.gamma:
        raise CheckpointError(
            f"{file}: gamma={golden.gamma!r}, but {config.origin} drafts {config.gamma} tokens per block; give the "
            "golden data of this draft"
        )
    for index, case in enumerate(golden.cases):
        _check_starts(file, index, case)
    _read_tensors(file.with_suffix(".safetensors"), golden)
    return golden


def _check_starts(file: Path, index: int, case: GoldenCase) -> None:
    starts = [golden_round.start for golden_round in case.rounds]
    end = len(case.prompt_ids) + len(case.output_ids)
    if starts and (starts != sorted(set(starts)) or starts[0] != len(case.prompt_ids) or starts[-1] >= end):
        raise CheckpointError(
            f"{file}: case {index} has round starts {starts}; they must rise from the prompt length "
            f"{len(case.prompt_ids)} and stay below {end}. Record the golden data again"
        )


def _read_tensors(file: Path, golden: Golden) -> None:
    if not file.exists():
        return
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); copy the golden data again") from error
    recorded = {(index, number) for index, case in enumerate(golden.cases) for number in range(len(case.rounds))}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"c(\d+)\.r(\d+)\.(\w+)", key)
        place = (int(match[1]), int(match[2])) if match else (-1, -1)
        if match is None or match[3] not in _TENSORS or place not in recorded:
            raise CheckpointError(
                f"{file}: tensor {key!r} belongs to no round of golden.json; expected c<case>.r<round>.<name>, "
                f"name one of {', '.join(_TENSORS)}"
            )
        golden.tensors.setdefault(place, {})[match[3]] = tensor


def load_target(target_dir: str | Path, model: DraftModel) -> Target:
    """Load the target, check it against the draft, and lend it embedding and LM head."""
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target_dir}: transformers cannot load this as a target ({error})") from error
    return lend_target(network, model)


def lend_target(network: Any, model: DraftModel) -> Target:
    """Check a loaded target against the draft, and lend the draft its embedding and LM head."""
    check_dimensions(model.config, network.config.get_text_config())
    embedding = network.get_input_embeddings()
    scale = float(getattr(embedding, "embed_scale", 1.0))
    model.bind_target(embedding.weight, network.get_output_embeddings().weight, embed_scale=scale)

    def target(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        output = network(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        # hidden_states[0] is the embedding output, hidden_states[i + 1] that of layer i: tap -1 is no special case.
        taps = [output.hidden_states[layer + 1][0] for layer in model.config.target_layer_ids]
        return output.logits[0], torch.cat(taps, dim=-1)

    return target
