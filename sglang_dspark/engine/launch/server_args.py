"""Start-up checks and defaults of ``ServerArgs`` under DSPARK."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dspark_kernels import widest_window
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
from sglang.srt.environ import envs

from sglang_dspark.calibration.sts import StsCalibration
from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft.families import family_of
from sglang_dspark.draft.pairing import check_dimensions, lacks_own
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.draft.target_files import quantised_layers
from sglang_dspark.draft.weights import check_draft_model, own_tensors
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import defaults, flag_rules, hooks
from sglang_dspark.engine.launch.adapters import adapter_refusals
from sglang_dspark.engine.launch.host_cache import host_cache_refusals
from sglang_dspark.engine.launch.target_refusals import rope_refusal
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.support import gpu_refusal, installed_sglang
from sglang_dspark.errors import ConfigError, EngineError, UnservedError
from sglang_dspark.hub import DRAFT_FILES, SUBFOLDER, drafter_in_target, local_folder

logger = logging.getLogger(__name__)

# Attention of prompts, by device; verification has kernels of its own, which read the K/V pools of all of these.
PREFILL_BACKENDS = {"cpu": ("torch_native",), "cuda": ("fa3", "flashinfer", "triton")}
SINK_BACKENDS = ("fa3", "triton")  # of these, which know attention sinks


@dataclass(frozen=True)
class _Options:
    """What our flags say, and the drafter."""

    config: DSparkConfig
    drafter: ResolvedDrafter | None


# SGLang asks us while it resolves its arguments, and does not pass our options on.
_options: ContextVar[_Options] = ContextVar("dspark_options")


@contextmanager
def prepared(args: Any, config: DSparkConfig) -> Iterator[None]:
    """Inside, SGLang may resolve ``args``: what it would decide otherwise is decided, and we know our options.

    Args:
        args: SGLang's ``ServerArgs``, not resolved yet.

    Raises:
        ConfigError, CheckpointError: see :func:`find_drafter`; or several machines may decide differently.
    """
    if args.nnodes > 1 and config.fallback == "target-only":
        raise ConfigError(
            f"{flag_name('fallback')}=target-only: each of --nnodes={args.nnodes} would decide for itself, and "
            "those that decide differently would wait for each other for ever; drop the flag"
        )
    # SGLang would read the draft's config, in which transformers does not know every format: complete() gives it back.
    drafter = find_drafter(args, config)
    args.speculative_draft_model_path = None
    if args.speculative_draft_model_quantization is None:
        args.speculative_draft_model_quantization = "unquant"  # or SGLang would take the target's for the drafter's
    _choose_attention_backend(args)
    defaults.serve_text(args)
    if args.sampling_backend not in (None, "pytorch"):
        logger.warning(
            "--sampling-backend=%s has no effect: DSPARK draws all tokens, by the law of the pytorch backend",
            args.sampling_backend,
        )
    token = _options.set(_Options(config, drafter))
    try:
        yield
    finally:
        _options.reset(token)


def _choose_attention_backend(args: Any) -> None:
    """On a CPU, where the user left the choice open, take the only backend that serves; on a GPU SGLang's is fine."""
    if not (args.attention_backend or args.prefill_attention_backend or args.decode_attention_backend):
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cpu":
            [args.attention_backend] = PREFILL_BACKENDS["cpu"]


def find_drafter(args: Any, config: DSparkConfig) -> ResolvedDrafter | None:
    """The drafter that ``args`` name, checked before the target is loaded; None where none is to be flag_rules.

    Raises:
        ConfigError: no path was given; or one where no drafter is to be flag_rules.
        CheckpointError: there is no such checkpoint, a file is missing or damaged, or the tensors do not fit
            ``config.json``.
    """
    flag, path = "--speculative-draft-model-path", args.speculative_draft_model_path
    if config.draft_free:
        if path is not None:
            raise ConfigError(
                f"{flag}={path} names a drafter, and {flag_name('draft_free')} serves without one; drop one of them"
            )
        return None
    path = path or drafter_in_target(args.model_path, revision=args.revision, cache_dir=args.download_dir)
    if not path:
        raise ConfigError(
            f"DSPARK needs a drafter: pass {flag} with a checkpoint of one for your target, which has none in a folder "
            f"{SUBFOLDER} of its own, or {flag_name('draft_free')} to serve requests with presets alone"
        )
    revision = args.speculative_draft_model_revision
    folder = local_folder(path, flag=flag, files=DRAFT_FILES, revision=revision, cache_dir=args.download_dir)
    drafter = ResolvedDrafter.read(folder)
    if _draft_load_format(args) != "dummy":
        check_draft_model(folder, drafter.reading)
    return drafter


def _draft_load_format(args: Any) -> str:
    """Return how the drafter's weights come, by SGLang's rule.

    Raises:
        ConfigError: a format that drafters do not have was asked for.
    """
    own = args.speculative_draft_load_format
    if own not in (None, "auto", "safetensors", "dummy"):
        raise ConfigError(
            f"--speculative-draft-load-format={own}: DSPARK reads drafters as safetensors; drop the flag, or pass "
            "dummy for random weights"
        )
    return str(own or args.load_format)


def validate(server_args: Any) -> None:
    """Refuse what DSPARK cannot serve yet. SGLang calls it while it resolves, in the main process.

    Raises:
        ConfigError: names the flag, its value and the remedy.
        EngineError: this SGLang resolves its arguments without our hook, which knows our options.
    """
    options = _options.get(None)
    if options is None:
        raise EngineError(
            f"sglang {installed_sglang()} resolved its arguments and did not call ServerArgs.resolve_once, so options "
            "of DSPARK would be dropped; sglang-dspark cannot serve on this release as it is"
        )
    dummy = options.drafter is not None and _draft_load_format(server_args) == "dummy"
    arguments.attach(server_args, DSparkServer(options.config, options.drafter, dummy))
    if (unserved := device_refusal(server_args.device)) is not None:
        raise UnservedError(unserved)
    for refusal in _refusals(server_args):
        raise ConfigError(refusal)


def device_refusal(device: str) -> str | None:
    """Return what is wrong with the device of a server; None where nothing is."""
    if device not in PREFILL_BACKENDS:
        return (
            f"DSPARK cannot run with --device={device}; pass cpu or cuda, or {flag_name('engine')} builtin where "
            "SGLang's own DSPARK knows the device"
        )
    if device == "cpu" or not torch.cuda.is_available():  # SGLang itself says that there is none
        return None
    found = gpu_refusal(torch.cuda.get_device_capability(), rocm=torch.version.hip is not None)
    return None if found is None else f"DSPARK cannot run with --device=cuda: {found}"


_SWITCHES = (
    (envs.SGLANG_RUST_SERVER, "unset it: requests are checked on their way through the Python server"),
    (
        envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING,
        "unset it: the drafter's K/V pool is as large as the target's at first",
    ),
)


def _refusals(args: Any) -> Iterator[str]:
    view = resolved_view(args)
    yield from expert_refusals(view)
    yield from flag_rules.refusals(args, view)
    for switch, remedy in _SWITCHES:
        if switch.get():
            yield f"DSPARK cannot run with {switch.name}=1 in the environment; {remedy}"
    prefill, decode = attention_backends_of(view)
    yield from adapter_refusals(args)
    yield from host_cache_refusals(args)
    sinks = model_config_of(args).has_attention_sinks
    yield from attention_refusals(args.device, prefill, decode, args.cuda_graph_backend_prefill, sinks=sinks)


def expert_refusals(view: Any) -> Iterator[str]:
    """What is wrong with the kernels of experts, before SGLang's choice for a drafter's is looked at.

    Args:
        view: SGLang's ``ServerArgs`` as it has resolved them.
    """
    for name in ("moe_a2a_backend", "moe_runner_backend"):  # SGLang derives the second from the first
        if getattr(view, name) == "flashinfer_megamoe":
            yield (
                f"DSPARK cannot run with {flag_rules.flag_of(name)}=flashinfer_megamoe, which SGLang has beside "
                "data-parallel attention alone; drop the flag"
            )


def attention_refusals(
    device: str, prefill: str, decode: str, graphs: str | None, *, sinks: bool = False
) -> Iterator[str]:
    """What is wrong with the attention of a server.

    Args:
        prefill, decode: backends as SGLang has resolved them.
        graphs: ``--cuda-graph-backend-prefill``; None where it was not given.
        sinks: whether the target has attention sinks.
    """
    served = [backend for backend in PREFILL_BACKENDS[device] if backend in SINK_BACKENDS or not sinks]
    if prefill not in served:
        remedy = f"pass --attention-backend {' or '.join(served)}"
        if sinks:
            on_a_gpu = "" if served else "serve it on a GPU and "
            remedy = f"the target has attention sinks: {on_a_gpu}pass --attention-backend {' or '.join(SINK_BACKENDS)}"
        yield f"DSPARK cannot run with --attention-backend={prefill} on {device}; {remedy}"
    elif decode != prefill:
        yield (
            f"DSPARK cannot run with --decode-attention-backend={decode}: verification has kernels of its own; "
            "drop the flag"
        )
    if graphs not in (None, "breakable", "disabled"):
        yield (
            f"DSPARK cannot run with --cuda-graph-backend-prefill={graphs}, whose graphs lose the hidden states that a "
            "drafter reads; pass breakable or disabled"
        )


def complete(server_args: Any) -> None:
    """Resolve our options against the checkpoint, fill the fields that size SGLang's buffers, install the front-end.

    Raises:
        ConfigError, CheckpointError: options, checkpoint or target do not fit together.
    """
    settled: DSparkServer = arguments.attached(server_args)
    config, drafter = settled.config, settled.drafter
    server_args.speculative_draft_model_path = None if drafter is None else drafter.path
    target = model_config_of(server_args)
    family_of(target.hf_config.architectures)  # refuses others
    if drafter is not None:
        _check_drafter(server_args, settled, drafter, target)
    gamma = config.gamma(None if drafter is None else drafter.config.gamma)
    if (unserved := rope_refusal(target, config.max_verify(gamma) + 1)) is not None:
        raise UnservedError(unserved)
    _check_options(server_args, config, drafter, gamma)
    for refusal in shape_refusals(server_args.device, target, server_args.kv_cache_dtype, config, drafter, gamma):
        raise ConfigError(refusal)
    defaults.fill(server_args, config.max_verify(gamma))
    defaults.limit_requests(server_args, config.max_verify(gamma))
    defaults.use_one_pool(server_args, target)
    hooks.install("routes", "front_end")
    _end_at_once()
    logger.info(
        "DSPARK: block size %d, policy %s, at most %d drafts verified per request, drafter %s",
        gamma,
        config.schedule,
        config.max_verify(gamma),
        "none" if drafter is None else drafter.path,
    )


def _end_at_once() -> None:
    """Have a server that fails end in seconds, and its clients with it.

    SGLang would keep them waiting for a minute in which CUDA may write core dumps, though CUDA was not told to.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def _check_drafter(server_args: Any, settled: DSparkServer, drafter: ResolvedDrafter, target: Any) -> None:
    check_dimensions(drafter.config, target.hf_text_config)
    if target.quantization is not None:
        # What only shows once the target is loaded, its handle refuses then.
        own: frozenset[str] = frozenset() if settled.dummy_draft else own_tensors(drafter.path, drafter.reading)
        tied = bool(getattr(target.hf_text_config, "tie_word_embeddings", False))
        for layer in quantised_layers(Path(server_args.model_path), tied=tied):
            if f"{layer}.weight" not in own:
                raise lacks_own(drafter.config, layer, f"is quantised ({target.quantization})")


def _check_options(server_args: Any, config: DSparkConfig, drafter: ResolvedDrafter | None, gamma: int) -> None:
    given = server_args.speculative_num_draft_tokens
    if given is not None and given != gamma + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens={given} contradicts the block size {gamma}; "
            f"pass {gamma + 1} or drop the flag"
        )
    if config.acceptance_profile(gamma) is not None and server_args.load_format != "dummy":
        raise ConfigError(
            f"{flag_name('simulate_acceptance')} gives up the target's text for the sake of step times; pass it with "
            "--load-format dummy, or drop it"
        )
    if config.schedule == "threshold" and drafter is not None and not drafter.config.enable_confidence_head:
        raise ConfigError(
            f"{flag_name('schedule')}=threshold needs a confidence head, and {drafter.config.origin} has none; "
            "use auto or static"
        )
    if config.confidence_sts_path is not None:
        # Only to refuse a bad file before the target is loaded; the worker reads it again.
        StsCalibration.load(
            Path(config.confidence_sts_path),
            gamma,
            target=server_args.model_path,
            draft=server_args.speculative_draft_model_path,
        )


def shape_refusals(
    device: str, target: Any, kv_cache_dtype: str, config: DSparkConfig, drafter: ResolvedDrafter | None, gamma: int
) -> Iterator[str]:
    """What attention cannot be computed for.

    Args:
        target: SGLang's ``ModelConfig``.
        kv_cache_dtype: as it was asked for.
    """
    if kv_cache_dtype in ("bfloat16", "bf16") and target.dtype != torch.bfloat16:
        yield (
            f"DSPARK cannot run with --kv-cache-dtype={kv_cache_dtype} beside a target in {target.dtype}: it serves "
            "K/V in the target's dtype or in fp8_e4m3; pass auto, or --dtype bfloat16"
        )
    if device != "cuda":
        return
    # Of the target's verification, an anchor and the drafts; of the drafter's block, its slots.
    windows = {target.head_dim: config.max_verify(gamma) + 1}
    if drafter is not None:
        head_dim = drafter.config.head_dim
        windows[head_dim] = max(windows.get(head_dim, 0), drafter.config.first_slot + gamma)
    for head_dim, width in windows.items():
        if width > (most := widest_window(head_dim, target.dtype)):
            yield (
                f"{flag_name('block_size')}={gamma} asks attention for {width} rows per request, and heads of "
                f"{head_dim} in {target.dtype} leave room for {most}; pass {gamma - width + most} or less"
            )
