"""SGLang's own model of a target, without a server: what it says of texts, and what of it is captured.

Every target has a process of its own, so that none finds what another has left behind.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from server_pool import NO_SCRIPTS, ON_GPU, WHOLE_WINDOWS, run_script

from sglang_dspark.tools.launch import CPU_ENV

DEVICE = "cuda" if ON_GPU else "cpu"

DATA = Path(__file__).parents[1] / "data" / "golden"
TAPS = (-1, 0, 2)
WINDOWS = (3, 1, 4, 2)  # rows of the first request in turn; the others take other turns
COLUMNS = 128
ATTENDED_LITERALLY = (
    *("GptOssForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
)
PATCHES = Path(__file__).parents[1] / "server" / "patches"


@dataclass(frozen=True)
class Text:
    """A request's text: ``ids`` in the end, of which the first ``prompt_len`` are its prompt."""

    ids: Sequence[int]
    prompt_len: int


@dataclass(frozen=True)
class Outputs:
    """Outputs of a target for a text.

    Attributes:
        features: [n, taps * d] at ``TAPS``, of all its tokens but the last.
        logits: [n - prompt_len, V] after each of these from the last one of the prompt on.
    """

    features: torch.Tensor
    logits: torch.Tensor


def ask(folder: Path, texts: Sequence[Text]) -> list[Outputs]:
    """Return what the target of ``folder`` says of these texts, all of them in one batch.

    Prompts are prefilled. The rest is verified in windows of unequal sizes, each of which ends with a wrong draft.
    """
    # Grouped routing is compiled otherwise, for half a minute.
    emulated = {**CPU_ENV, "TORCH_COMPILE_DISABLE": "1", **WHOLE_WINDOWS}
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    if architecture == "Mistral3ForConditionalGeneration":
        emulated |= NO_SCRIPTS
    path = str(Path(__file__).parent)
    script = (
        f"import json, sys; sys.path.append({path!r}); import target_probe as p; p.answer(*json.loads(sys.argv[1]))"
    )
    order = [str(folder), [[list(text.ids), text.prompt_len] for text in texts]]
    run_script(script, order, {} if ON_GPU else emulated, folder / "probe.log")
    tensors = load_file(folder / "outputs.safetensors")
    return [Outputs(tensors[f"features.{i}"], tensors[f"logits.{i}"]) for i in range(len(texts))]


class _Loaded:
    """A target that SGLang has loaded."""

    def __init__(self, folder: Path) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch
        from sglang.srt.server_args import PortArgs, ServerArgs

        from sglang_dspark.draft.families import family_of
        from sglang_dspark.draft.formats import read_content
        from sglang_dspark.engine.target import Target, slot_translation
        from sglang_dspark.engine.verify import verify_with_prompts
        from sglang_dspark.features.pictures import Positions, place_rows
        from sglang_dspark.features.recurrent import States

        [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
        literal: dict[str, Any] = {}
        if architecture in ATTENDED_LITERALLY and not ON_GPU:
            literal = {"attention_backend": _literal_attention(), "moe_runner_backend": "triton"}
        states: dict[str, Any] = {}
        if family_of([architecture]).recurrent:
            states = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
            states["max_mamba_cache_size"] = 16
        args = ServerArgs(
            model_path=str(folder),
            tokenizer_path=str(DATA / "target"),
            device=DEVICE,
            dtype="bfloat16" if ON_GPU else "float32",  # SGLang's kernels for CUDA have no float32 form
            disable_cuda_graph=True,
            mem_fraction_static=0.3,
            max_total_tokens=2048,
            max_running_requests=4,
            **{"attention_backend": "triton" if ON_GPU else "torch_native"} | literal | states,
        )
        ForwardBatch.compute_spec_mrope_positions = place_rows  # a hook of the scheduler's process
        args.resolve_once()
        one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
        one_batch._init_process_global_configs()
        wrapped, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner = wrapped.torch_runner
        if slot_translation(self.runner.token_to_kv_pool) is not None:
            # Otherwise a pool of windows would number its rows as slots are numbered.
            self.runner.token_to_kv_pool_allocator.swa_attn_allocator.alloc(7)
        hf = self.runner.model_config.hf_text_config
        content = json.loads((DATA / "vanilla_g7" / "config.json").read_text()) | {
            "hidden_size": hf.hidden_size,
            "vocab_size": hf.vocab_size,
            "num_target_layers": hf.num_hidden_layers,
            "target_layer_ids": list(TAPS),
        }
        self.target = Target(self.runner, read_content(content, origin="probe").config)
        self.runner.model.set_dflash_layers_to_capture([tap for tap in TAPS if tap >= 0])
        verify_with_prompts(self.runner)
        self.worker = SimpleNamespace(
            model_runner=self.runner,
            forward_batch_generation=lambda batch, forward_batch, **_: self.runner.forward(forward_batch),
        )
        if positions := Positions.of(self.worker):
            positions.attention_made()
        if states:
            States(self.worker).attention_made()

    @torch.no_grad()
    def outputs(self, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        batch = self._batch(texts)
        features, logits = self._prefill(batch, texts)
        done, turn = [text.prompt_len for text in texts], 0
        while any(count < len(text.ids) - 1 for count, text in zip(done, texts, strict=True)):
            # A request that is through verifies nothing but wrong drafts.
            left = [len(text.ids) - 1 - count for count, text in zip(done, texts, strict=True)]
            sizes = [min(WINDOWS[(turn + i) % len(WINDOWS)], most) for i, most in enumerate(left)]
            new_features, new_logits = self._verify(batch, texts, done, sizes)
            for i, size in enumerate(sizes):
                features[i].append(new_features[i][:size])
                logits[i].append(new_logits[i][:size])
                done[i] += size
            turn += 1
        named = {f"features.{i}": torch.cat(parts) for i, parts in enumerate(features)}
        return named | {f"logits.{i}": torch.cat(parts) for i, parts in enumerate(logits)}

    def _batch(self, texts: Sequence[Text]) -> Any:
        from array import array

        from sglang.benchmark.one_batch import TreeCacheNamespace
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        requests = []
        for i, text in enumerate(texts):
            prompt = array("q", text.ids[: text.prompt_len])
            request = Req(str(i), "", prompt, SamplingParams(temperature=0, max_new_tokens=8))
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            request.extend_end = text.prompt_len
            requests.append(request)
        pools = {name: getattr(self.runner, name) for name in ("req_to_token_pool", "token_to_kv_pool_allocator")}
        tree = TreeCacheNamespace(
            page_size=1, device=DEVICE, token_to_kv_pool_allocator=pools["token_to_kv_pool_allocator"]
        )
        batch = ScheduleBatch.init_new(
            reqs=requests,
            **pools,
            tree_cache=tree,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(DEVICE)
        return batch

    def _prefill(self, batch: Any, texts: Sequence[Text]) -> tuple[list[Any], list[Any]]:
        from sglang_dspark.engine.target import capturing_forward

        forward = capturing_forward(batch, self.runner)
        output = self.runner.forward(forward).logits_output
        features = self.target.features(forward.input_ids, output.hidden_states)
        lens = [text.prompt_len for text in texts]
        # Slots of what comes: rows beyond a prompt, which only this batch uses.
        table, pool = self.runner.req_to_token_pool.req_to_token, self.runner.token_to_kv_pool_allocator
        for row, length in zip(batch.req_pool_indices.tolist(), lens, strict=True):
            table[row, length:COLUMNS] = pool.alloc(COLUMNS - length).int()
        return [[part] for part in features.split(lens)], [[row[None]] for row in output.next_token_logits]

    def _verify(self, batch: Any, texts: Sequence[Text], done: list[int], sizes: list[int]) -> Any:
        """Features and logits of the next ``sizes`` tokens of all texts, and of a wrong draft after each."""
        from sglang_dspark.engine.verify import run_verify

        runner, table = self.runner, self.runner.req_to_token_pool.req_to_token
        ids, positions, slots = [], [], []
        for row, text, start, size in zip(batch.req_pool_indices.tolist(), texts, done, sizes, strict=True):
            right = list(text.ids[start : start + size])
            ids += [*right, (text.ids[start + size] + 1) % runner.model_config.vocab_size]
            positions += range(start, start + size + 1)
            slots.append(table[row, start : start + size + 1].long())
        plan = SimpleNamespace(
            verify_lens=torch.tensor(sizes, device=DEVICE),
            indptr=torch.tensor([0, *accumulate(size + 1 for size in sizes)], device=DEVICE),
            requests=torch.arange(len(sizes), device=DEVICE).repeat_interleave(torch.tensor(sizes, device=DEVICE) + 1),
            input_ids=torch.tensor(ids, device=DEVICE),
            positions=torch.tensor(positions, device=DEVICE),
            slots=torch.cat(slots),
            width=max(sizes) + 1,
        )
        batch.seq_lens_cpu = torch.tensor(done)
        batch.seq_lens = prefix_lens = batch.seq_lens_cpu.to(DEVICE)
        step = SimpleNamespace(batch=batch, req_pool_indices=batch.req_pool_indices, prefix_lens=prefix_lens)
        output, captured, advance = run_verify(self.worker, step, plan)
        if advance is not None:
            advance(plan.verify_lens)
        lens = [size + 1 for size in sizes]
        features = self.target.features(plan.input_ids, captured)
        return features.split(lens), output.next_token_logits.split(lens)


def _literal_attention() -> str:
    """Name of a backend for prompts that SGLang lacks on a CPU."""
    sys.path.append(str(PATCHES))
    attention = importlib.import_module("literal_attention")
    attention.install(importlib.import_module("sglang.srt.layers.attention.attention_registry"))
    return str(attention.NAME)


def answer(folder: str, given: Sequence[tuple[Sequence[int], int]]) -> None:
    """Write what :func:`ask` returns, as the only target of this process."""
    tensors = _Loaded(Path(folder)).outputs([Text(*text) for text in given])
    kept = {name: tensor.float().cpu().clone() for name, tensor in tensors.items()}
    save_file(kept, Path(folder) / "outputs.safetensors")
