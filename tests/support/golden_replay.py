"""Replay of golden vectors: does this package compute what the checkpoint's own implementation computed?

A golden directory holds ``golden.json`` (greedy decodes: prompts, outputs, and every round's draft and accept count)
and perhaps ``golden.safetensors`` (hidden states and logits of some rounds, ``c{case}.r{round}.{name}``). Every round
starts from the recorded history, so that a wrong one shows on its own.

The golden pair after a fine-tune: other weights of the same shapes, and how they get into a running server.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from golden_server import DRAFT, TARGET, call
from reference_decoding import ContextKV, ReferenceBlock, Target, accept_greedy, draft_block
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_dspark.draft.config import check_dimensions
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import EMBEDDING, LM_HEAD, load_draft_model
from sglang_dspark.tools.launch import LaunchedServer, free_port

TENSOR_ATOL = 1e-4  # absolute; both sides are float32, only the order of summation differs

_TENSORS: Mapping[str, Callable[[ReferenceBlock], Tensor | None]] = {
    "block_hidden": lambda block: block.hidden,
    "base_logits": lambda block: block.base_logits,
    "logits": lambda block: block.logits,
    "confidence_logits": lambda block: block.confidence_logits,
}


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


class Golden(msgspec.Struct, frozen=True):
    """The content of a ``golden.json``."""

    max_new_tokens: int
    stop_token_ids: list[int]
    cases: list[GoldenCase]

    def ends_at_limit(self, case: GoldenCase, golden_round: GoldenRound) -> bool:
        """Return whether a round reached the token limit: recorders may cut its accept count."""
        return golden_round.start + golden_round.accepted + 1 >= len(case.prompt_ids) + self.max_new_tokens


@dataclass
class GoldenReport:
    """The comparisons and their differences."""

    checked: Counter[str] = field(default_factory=Counter)  # what was compared -> number of comparisons
    mismatches: list[tuple[str, int, int]] = field(default_factory=list)  # what, case, round

    def add(self, name: str, case: int, number: int, *, equal: bool) -> None:
        """Count one comparison."""
        self.checked[name] += 1
        if not equal:
            self.mismatches.append((name, case, number))


def load_golden(folder: Path) -> Golden:
    """Read the recorded decodes of a golden directory."""
    return msgspec.json.decode((folder / "golden.json").read_bytes(), type=Golden)


@torch.no_grad()
def replay(target_dir: Path, draft_dir: Path) -> GoldenReport:
    """Run target and draft over the golden data next to the draft, in float32 on the CPU, and compare.

    Anchors, drafts and accept counts must be equal, tensors within :data:`TENSOR_ATOL`.
    """
    model = load_draft_model(draft_dir, dtype=torch.float32, device="cpu")
    target, golden, report = load_target(target_dir, model), load_golden(draft_dir), GoldenReport()
    file = draft_dir / "golden.safetensors"
    tensors = load_file(file) if file.exists() else {}
    for index, case in enumerate(golden.cases):
        ids, context = case.prompt_ids + case.output_ids, ContextKV(model)
        _, features = target(ids)
        for number, expected in enumerate(case.rounds):
            context.append(features[context.length : expected.start])
            report.add("anchor", index, number, equal=expected.anchor == ids[expected.start])
            block = draft_block(model, context, expected.anchor)
            report.add("draft", index, number, equal=expected.draft == block.tokens)
            for name, of_block in _TENSORS.items():
                if (recorded := tensors.get(f"c{index}.r{number}.{name}")) is not None:
                    report.add(name, index, number, equal=_close(recorded, of_block(block)))
            if not golden.ends_at_limit(case, expected):
                logits, _ = target([*ids[: expected.start + 1], *expected.draft])
                accepted, _ = accept_greedy(logits[expected.start :], expected.draft, golden.stop_token_ids)
                report.add("accepted", index, number, equal=expected.accepted == accepted)
    return report


def _close(expected: Tensor, got: Tensor | None) -> bool:
    return got is not None and got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=TENSOR_ATOL)


def load_target(target_dir: str | Path, model: DraftModel) -> Target:
    """Load the target, check it against the draft, and lend it embedding and LM head."""
    return lend_target(AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval(), model)


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


FILE = "model.safetensors"


def tuned(folder: Path, origin: Path = TARGET, *, by: float = 0.2, seed: int = 1) -> Path:
    """Write a checkpoint whose matrices differ from those of ``origin`` by noise of so many standard deviations.

    A drafter keeps what it has of its target.
    """
    shutil.copytree(origin, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(origin / FILE)
    for name, weight in tensors.items():
        if weight.dim() > 1 and name not in (EMBEDDING, LM_HEAD):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((by * weight.float().std() * noise).to(weight.dtype))
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def serialized(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Return tensors as the route takes them: they lie in shared memory that any process of this machine can open."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")
    return [MultiprocessingSerializer.serialize(list(named.items()), output_str=True)]


def from_disk(server: LaunchedServer, folder: Path, **fields: Any) -> dict[str, Any]:
    """Have a server load a target."""
    return answered(server, "/update_weights_from_disk", {"model_path": str(folder), **fields})


def from_tensors(server: LaunchedServer, source: Path | Mapping[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    """Hand tensors, or those of a checkpoint, to each of two ranks at most."""
    answered(server, "/begin_weight_update", {})
    tensors = load_file(source / FILE) if isinstance(source, Path) else source
    body = {"serialized_named_tensors": serialized(tensors) + serialized(tensors), **fields}
    try:
        return answered(server, "/update_weights_from_tensor", body)
    finally:
        answered(server, "/end_weight_update", {})


def from_trainer(server: LaunchedServer, folder: Path) -> dict[str, Any]:
    """Send a target's tensors through a group of processes that this one leads."""
    from sglang.srt.utils import init_custom_process_group

    tensors, port = load_file(folder / FILE), free_port()
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "group_name": "trainer"}
    joins = {**group, "rank_offset": 1, "backend": "gloo"}
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "trainer",
    }
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(answered, server, "/init_weights_update_group", joins)
        ranks = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="trainer")
        joined.result()
        answered(server, "/begin_weight_update", {})
        written = pool.submit(answered, server, "/update_weights_from_distributed", body)
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=ranks)
        answer = written.result()
        answered(server, "/end_weight_update", {})
        answered(server, "/destroy_weights_update_group", {"group_name": "trainer"})
    torch.distributed.destroy_process_group(ranks)
    return answer


def answered(server: LaunchedServer, path: str, body: Any) -> dict[str, Any]:
    """Return an answer that is a success."""
    status, text = call(server, path, body=body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def trained_drafter(folder: Path, *, by: float = 0.1, seed: int = 2) -> Path:
    """Write a drafter of the golden target, of the same form, that was trained on."""
    return tuned(folder, DRAFT, by=by, seed=seed)


def bare(drafter: Path, folder: Path) -> Path:
    """Write a drafter without what it has of its target."""
    shutil.copytree(drafter, folder)
    tensors = {name: tensor for name, tensor in load_file(drafter / FILE).items() if name not in (EMBEDDING, LM_HEAD)}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder
