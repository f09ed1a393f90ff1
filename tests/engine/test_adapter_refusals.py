"""Where LoRA adapters are refused at the start."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.engine.launch.adapters import adapter_refusals


@pytest.fixture(autouse=True)
def pinned_memory(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def server(**given):
    defaults = {"enable_lora": True, "lora_paths": None, "lora_backend": "csgmv", "device": "cuda"}
    return SimpleNamespace(**{**defaults, **given})


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", "csgmv"), ("cuda", "triton"), ("cpu", "torch_native")], ids=str
)
def test_backends_whose_kernels_read_ragged_rows(device, backend):
    assert list(adapter_refusals(server(device=device, lora_backend=backend))) == []


@pytest.mark.parametrize(
    ("device", "backend", "remedy"),
    [
        ("cuda", "torch_native", "pass --lora-backend csgmv or triton"),
        ("cuda", "ascend", "pass --lora-backend csgmv or triton"),
        ("cpu", "csgmv", "pass --lora-backend torch_native"),
    ],
)
def test_other_backends_are_refused_by_name(device, backend, remedy):
    [refusal] = adapter_refusals(server(device=device, lora_backend=backend))
    assert f"--enable-lora and --lora-backend={backend} on {device}" in refusal
    assert refusal.endswith(remedy)


def test_paths_alone_ask_for_adapters():
    [refusal] = adapter_refusals(server(enable_lora=None, lora_paths=["x"], lora_backend="ascend"))
    assert "--lora-paths" in refusal
    assert list(adapter_refusals(server(enable_lora=None, lora_paths=[], lora_backend="ascend"))) == []


def test_a_machine_without_pinned_memory_is_told(monkeypatch):
    def fail(tensor):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    [refusal] = adapter_refusals(server(device="cpu", lora_backend="torch_native"))
    assert "pinned memory" in refusal
