"""The cache of states is chosen while SGLang resolves its arguments."""

from pathlib import Path

import pytest
from family_targets import written_target
from random_drafter import random_drafter
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.engine import hooks
from sglang_dspark.engine.flags import MIN_REQUESTS
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.recurrent import FEATURE
from sglang_dspark.tools.launch import PLUGIN

TOKENIZER = Path(__file__).parents[2] / "data" / "golden" / "target"


@pytest.fixture
def settled(monkeypatch, tmp_path):
    """Resolves the arguments of a server on a CPU, of a target of this class."""
    load_plugins()
    monkeypatch.setattr(hooks, "install", lambda *places: None)
    for name in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION"):
        monkeypatch.setenv(name, "0")  # or starting would leave it behind
    drafter = random_drafter(tmp_path / "draft", "tiny")

    def settle(*flags, architecture="Qwen3_5ForCausalLM"):
        folder = tmp_path / architecture
        target = folder if folder.exists() else written_target(architecture, folder)
        pair = ("--model-path", str(target), "--speculative-draft-model-path", str(drafter))
        args = prepare_server_args([*pair, "--tokenizer-path", str(TOKENIZER), "--device", "cpu", *PLUGIN, *flags])
        args.resolve_once()
        return args

    return settle


def test_states_are_kept_as_a_cpu_can(settled):
    """SGLang would choose snapshots, and end the start by an assertion."""
    for given in ((), ("--mamba-radix-cache-strategy", "no_buffer"), ("--disable-radix-cache",)):
        args = settled(*given)
        assert FEATURE.is_used(args)
        made = resolving_view(args)
        assert (made.mamba_radix_cache_strategy, made.disable_overlap_schedule) == ("no_buffer", True)
    with pytest.raises(ConfigError, match=r"--mamba-radix-cache-strategy=extra_buffer on cpu: .*; drop the flag"):
        settled("--mamba-radix-cache-strategy", "extra_buffer")
    other = settled(architecture="Qwen3ForCausalLM")
    assert not FEATURE.is_used(other) and not resolving_view(other).disable_overlap_schedule


@pytest.mark.parametrize(("given", "expected"), [((), MIN_REQUESTS), (("--max-running-requests", "5"), 5)])
def test_requests_with_states_are_limited_on_a_cpu(settled, given, expected):
    """Without a limit SGLang does not know how many states it shall make."""
    assert resolving_view(settled(*given)).max_running_requests == expected
    assert resolving_view(settled(*given, architecture="Qwen3ForCausalLM")).max_running_requests in (None, 5)


def test_its_hook_is_there_before_any_arguments_are(monkeypatch):
    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, handler, kind: registered.append(target))
    hooks.register_flags()
    [hook] = hooks.feature_hooks(FEATURE, ("flags",))
    assert hook.target in registered
