"""Servers for the end-to-end tests: real SGLang processes, each a fixture of its own.

A test names the servers that it asks. Tests that share one, except the target alone, run in the same process one after
another, so that every server is started once. All know one more policy, ``random``, see ``random_lengths``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from family_targets import picture_target, spoken_target, written_target
from golden_server import (
    CHECKS_ORDER,
    DRAFT,
    DSPARK,
    PLANTED_FAULTS,
    PROPOSED,
    TARGET,
    TWO_RANKS,
    builtin_worker,
    emulated_graphs,
    of_sglang_alone,
)
from letter_tokenizers import save_byte_tokenizer, save_piece_tokenizer
from published_drafters import published_drafter
from quantised_drafter import quantised_drafter
from quantised_target import adapter_flags, int8_target
from random_drafter import damaged_drafter, random_drafter
from server_pool import (
    LITERAL_FLAGS,
    LITERALLY,
    NO_SCRIPTS,
    NO_SNAPSHOTS,
    ON_GPU,
    WHOLE_WINDOWS,
    Flags,
    Recipe,
    ServerPool,
)

from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.scheduling.sts import StsCalibration
from sglang_dspark.tools import demo
from sglang_dspark.tools.launch import LaunchedServer, dspark_flags


def _drafter(write: Callable[[Path], Path]) -> Callable[[Path], Flags]:
    return lambda folder: dspark_flags(write(folder / "draft"))


def _step_times(folder: Path) -> Flags:
    return "--speculative-dspark-sps-table-path", folder / "step_times.json"


def _random(variant: str) -> Callable[[Path], Flags]:
    return _drafter(partial(random_drafter, variant=variant))


def _published(form: str) -> Callable[[Path], Flags]:
    return _drafter(partial(published_drafter, form=form))


def _smollm2(folder: Path) -> Path:
    return demo.build(Path.home() / ".cache" / "sglang-dspark" / "smollm2-135m-instruct")


def _quantised(source: Path, form: str) -> Callable[[Path], Flags]:
    def write(folder: Path) -> Path:
        quantised_drafter(source, folder, form)
        return folder

    return _drafter(write)


def _target(write: Callable[[str, Path], Path], architecture: str) -> Callable[[Path], Path]:
    return lambda folder: write(architecture, folder / "target")


def _tokenizer(save: Callable[[Path], Path], folder: Path) -> Flags:
    return ("--tokenizer-path", save(folder))


def _by_a_file(lines: Sequence[str], folder: Path) -> Flags:
    """Return the flags of a server whose options stand in a file."""
    (folder / "server.yaml").write_text("\n".join(lines))
    return ("--config", folder / "server.yaml")


def _configured(folder: Path) -> Flags:
    StsCalibration((2.0,) * 7).save(folder / "temperatures.json")
    save_token_ids(folder / "vocabulary.json", PROPOSED)
    paths = (
        f"speculative-dspark-confidence-sts-path: {folder / 'temperatures.json'}",
        f"speculative-dspark-draft-vocabulary: {folder / 'vocabulary.json'}",
    )
    return _by_a_file((*CONFIGURED, *paths), folder)


def _tiny(architecture: str, *flags: str, env: Mapping[str, str] | None = None) -> Recipe:
    """Return the recipe of a target of this family and a drafter, both with random weights."""
    tokenizer = ("--tokenizer-path", TARGET)
    return Recipe((_random("tiny"), *tokenizer, *flags), model=_target(written_target, architecture), env=env or {})


def _reading(architecture: str, *flags: str, env: Mapping[str, str] | None = None) -> Recipe:
    """Return the same, of a target that reads pictures."""
    return Recipe((_random("tiny"), *flags), model=_target(picture_target, architecture), env=env or {})


BUNDLED = Path(demo.__file__).parents[1] / "drafters" / "smollm2-135m-instruct"
STATIC = "--speculative-dspark-schedule static"
WITHOUT_A_DRAFTER = ("speculative-algorithm: DSPARK", "speculative-dspark-draft-free: true")
SAVES_MEMORY = "--enable-memory-saver --enable-weights-cpu-backup --speculative-draft-load-format dummy"
KEEPS_ANSWERS = "--speculative-dspark-answer-cache 1"
CONFIGURED = (
    *("speculative-algorithm: DSPARK", f"speculative-draft-model-path: {DRAFT}", "speculative-dspark-engine: plugin"),
    *("speculative-dspark-schedule: threshold", "speculative-dspark-confidence-threshold: 0.6"),
    *("speculative-dspark-online-calibration: off", "speculative-dspark-untested-sglang: true"),
    *("speculative-dspark-draft-quantization: int8", "enable-priority-scheduling: true", "stream-interval: 8"),
    *("speculative-dspark-tpot-ms: 9000", "speculative-dspark-min-tpot-ms: 0.2"),
)
OF_A_SERVICE = {"SGLANG_DSPARK_SERVICE_PORT_HTTP": "30000", "SGLANG_DSPARK_PORT_30000_TCP_ADDR": "10.0.0.7"}
CHUNKS, MIXED = "--chunked-prefill-size", "--enable-mixed-chunk"
PROMPT_ROWS = "--speculative-dspark-prompt-rows"
UNPROVEN = "--speculative-dspark-unproven held-rows,survivals"  # of an emulated GPU, where they are off by default
FIXED_TILES = {"FIXED_TILES": "1"}  # of attention, as with --enable-deterministic-inference on a GPU
# A pool that cannot hold the running requests.
SELF_CHECK = "--speculative-dspark-self-check"
CROWDED = "--schedule-conservativeness 0.01 --max-total-tokens"
# Of texts, the radix cache gets states from their middle, and steps overlap, as on a GPU.
SNAPSHOTS = {"SNAPSHOTS_ON_A_CPU": "1", **WHOLE_WINDOWS}
MIDDLE_STATES = "--mamba-track-interval 64 --max-mamba-cache-size 80 --context-length 256"
STATES = "--max-mamba-cache-size 48 --context-length 256"
LLGUIDANCE = "--grammar-backend llguidance"
SESSIONS = "--enable-streaming-session"
PARSERS = "--tool-call-parser qwen25 --reasoning-parser deepseek-r1"
LORA = "csgmv" if ON_GPU else "torch_native"
FOUR = "--max-running-requests 4"
STATES_SHOWN = "--enable-return-hidden-states"
# Step times of two ranks that share two cores take a minute to measure for 16 requests and seven drafts.
INT4 = "--speculative-draft-model-quantization compressed-tensors"  # SGLang's name for it
PARALLEL = f"--tp-size 2 {FOUR} --speculative-dspark-block-size 3"
RATES = "0.9,0.6,0.8,0.7"  # the rest as the last
# If a schema allows whitespace, the golden target writes nothing else.
TERSE = "--constrained-json-disable-any-whitespace"
THINKING = f"--reasoning-parser qwen3 --enable-strict-thinking {TERSE} {SESSIONS} {STATES_SHOWN}"
PIECES = partial(_tokenizer, save_piece_tokenizer)
LETTERS = partial(_tokenizer, save_byte_tokenizer)  # grammars have SGLang's default backend unless flags say otherwise
BEYOND = partial(_tokenizer, partial(save_byte_tokenizer, beyond=("<beyond>",)))
ADVISED = (*DSPARK, KEEPS_ANSWERS, BEYOND, TERSE, "--enable-metrics --decode-log-interval 8")
OF_BATCHES = partial(int8_target, scales={"self_attn": "batch", "mlp": "batch"})
MOE = "Qwen3MoeForCausalLM"
GEMMA4 = "Gemma4ForConditionalGeneration"
GEMMA4_12B = "Gemma4UnifiedForConditionalGeneration"
GEMMA4_FLAGS = " ".join(("--chunked-prefill-size 16", *LITERAL_FLAGS))

SERVERS: dict[str, Recipe] = {
    # The target alone, and DSPARK with its defaults.
    "plain": Recipe([STATES_SHOWN]),
    "dspark": Recipe((*DSPARK, _step_times)),
    # Every scheduling of SGLang that is not the default, K/V in pages, and a part of the drafter's block and context.
    # Tokens of this one and of SGLang's own worker are pieces of letters.
    "corner": Recipe(
        (
            *(*DSPARK, f"--disable-overlap-schedule {CHUNKS} 64 --page-size 16 {SESSIONS}", PIECES),
            f"--speculative-num-draft-tokens 4 {MIXED} --speculative-draft-window-size 12 {PROMPT_ROWS} 64",
            "--incremental-streaming-output",
        )
    ),
    # Pools smaller than the context, as of long contexts on one GPU.
    "small_pool": Recipe((*DSPARK, STATIC, f"{CROWDED} 256")),
    # Drafters of other forms than DeepSpec's: test_targets.py; in a context that requests grow out of.
    "tight": Recipe(
        (
            _published("speculators"),
            f"--context-length 128 {CROWDED} 600 {CHUNKS} 64 {MIXED} {SESSIONS} {PROMPT_ROWS} 64",
            STATES_SHOWN,
            "--enable-deterministic-inference",
        )
    ),
    # Random weights: it knows nothing.
    "dflash": Recipe((_random("dflash"), KEEPS_ANSWERS, "--speculative-dspark-answer-cache-key prompt")),
    "dflash2": Recipe((_random("dflash2"), f"--tp-size 2 {FOUR} {CROWDED} 260"), env=TWO_RANKS),
    "long_block": Recipe((_random("long-block"), STATIC, "--speculative-dspark-verify-len 1 --context-length 96")),
    "draft_free": Recipe((partial(_by_a_file, WITHOUT_A_DRAFTER), "--fastapi-root-path /behind/a/proxy")),
    # Options in a file that no other server has, and variables of a Kubernetes Service with the plugin's name.
    "configured": Recipe((_configured, "--max-running-requests 2"), env=OF_A_SERVICE),
    "target_only": Recipe((_drafter(damaged_drafter), "--speculative-dspark-fallback target-only")),
    "guarded": Recipe(
        (*DSPARK, "--enable-metrics --chat-template chatml --api-key user-key --admin-api-key admin-key")
    ),
    # Blocks longer than the drafter's, whose last slots are copied; prompts next to running requests, under overlap.
    # The tokenizer knows a token more than the target.
    "letters": Recipe(
        (
            *DSPARK,
            BEYOND,
            TERSE,
            KEEPS_ANSWERS,
            STATES_SHOWN,
            "--speculative-dspark-block-size 15",
            f"{MIXED} {CHUNKS} 64 {PROMPT_ROWS} 63",
        )
    ),
    # All that advises: kept answers, metrics, forced tokens of SGLang's default grammar backend.
    "advised": Recipe(ADVISED),
    "planted": Recipe(ADVISED, env=PLANTED_FAULTS),
    # Under overlap SGLang counts penalties one token late.
    "plain_letters": Recipe((LETTERS, TERSE, "--disable-overlap-schedule", STATES_SHOWN)),
    # Streams that are parsed; every step commits as much as it can.
    "plain_parsers": Recipe([PARSERS], model=spoken_target),
    "parsers": Recipe((*DSPARK, STATIC, PARSERS), model=spoken_target),
    # Budgets of thinking, in sessions too.
    "plain_thinking": Recipe([THINKING], model=spoken_target),
    "thinking": Recipe((*DSPARK, THINKING), model=spoken_target),
    # SGLang's own worker, by our schedule and as it comes.
    "scheduled": Recipe((*DSPARK, PARSERS, PIECES), env=builtin_worker("scheduled", "compact")),
    "scheduled_corner": Recipe(
        (*DSPARK, f"--disable-overlap-schedule {CHUNKS} 64 {MIXED} {CROWDED} 600 {SESSIONS}"),
        env=builtin_worker("scheduled", "compact"),
    ),
    "scheduled_parallel": Recipe(
        (*DSPARK, PARALLEL), env={**builtin_worker("scheduled", "compact"), **TWO_RANKS}, forked=False
    ),
    # Blocks that are computed whole, and cut, of a target that our worker does not serve.
    "whole_blocks": Recipe((*DSPARK, f"{CROWDED} 600"), env=builtin_worker("scheduled"), model=of_sglang_alone),
    "whole_blocks_parallel": Recipe(
        (*DSPARK, PARALLEL), env={**builtin_worker("scheduled"), **TWO_RANKS}, forked=False
    ),
    "builtin": Recipe(DSPARK, env=builtin_worker("auto"), model=of_sglang_alone),
    "parallel": Recipe(
        (
            *(_quantised(DRAFT, "fp8 by row"), PARALLEL, KEEPS_ANSWERS, STATES_SHOWN),
            f"{MIXED} --speculative-dspark-max-gap-ms 1 {PROMPT_ROWS} 99",
        ),
        env=TWO_RANKS,
    ),
    # Two schedulers, asked by two processes, of which a test may suspend one for a while.
    "replicas": Recipe(
        (*DSPARK, _step_times, FOUR, "--dp-size 2 --tokenizer-worker-num 2 --enable-metrics --chat-template chatml"),
        env={**TWO_RANKS, "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "600"},
        forked=False,
    ),
    # Steps staged and replayed as on a GPU; an interpreted step takes a tenth of a second.
    "graphs": Recipe(
        (*DSPARK, FOUR, MIXED, f"--speculative-dspark-block-size 11 {PROMPT_ROWS} 24", STATES_SHOWN, SELF_CHECK),
        env=emulated_graphs(),
    ),
    "ordered": Recipe(
        (*DSPARK, f"{FOUR} {MIXED} {PROMPT_ROWS} 16 {CROWDED} 256 {UNPROVEN}"), env=emulated_graphs() | CHECKS_ORDER
    ),
    # Memory that a pause overwrites.
    "saving": Recipe((*DSPARK, SAVES_MEMORY)),
    "graphs_saving": Recipe((*DSPARK, f"{FOUR} {UNPROVEN}", SAVES_MEMORY), env=emulated_graphs() | FIXED_TILES),
    # A quantised target of which a row's result depends on the whole batch.
    "plain_int8_batch": Recipe(model=OF_BATCHES),
    "int8_batch": Recipe((*DSPARK, FOUR), model=OF_BATCHES, env=emulated_graphs()),
    # Random weights, whose drafts are kept by the same draws, by our worker and by SGLang's own.
    "simulated": Recipe(
        (*DSPARK, FOUR, f"--load-format dummy --speculative-dspark-simulate-acceptance {RATES}"), env=emulated_graphs()
    ),
    "simulated_builtin": Recipe(
        (*DSPARK, "--load-format dummy"),
        env={**builtin_worker("builtin"), "SGLANG_DSPARK_SIMULATE_ACCEPTANCE": RATES},
        forked=False,
    ),
    "plain_adapters": Recipe([partial(adapter_flags, backend=LORA)]),
    # In a pool that is too small for sixteen requests.
    "adapters": Recipe(
        (_published("ModelOpt"), partial(adapter_flags, backend=LORA), f"{MIXED} {CROWDED} 700 {PROMPT_ROWS} 40")
    ),
    "parallel_adapters": Recipe((*DSPARK, partial(adapter_flags, backend=LORA), PARALLEL), env=TWO_RANKS, forked=False),
    "adapter_graphs": Recipe(
        (
            _random("dflash2 with biases"),
            partial(adapter_flags, backend="triton"),
            FOUR,
            f"--speculative-dspark-block-size 3 {PROMPT_ROWS} 8",
        ),
        env=emulated_graphs(),
    ),
    # Layers with windows have a K/V pool of their own.
    "gemma4_graphs": _tiny(
        GEMMA4, GEMMA4_FLAGS, f"{FOUR} {PROMPT_ROWS} 16 {UNPROVEN}", env=LITERALLY | emulated_graphs()
    ),
    "gemma4_pictures": _reading(GEMMA4, GEMMA4_FLAGS, env=LITERALLY),
    "gemma4_12b_pictures": _reading(GEMMA4_12B, GEMMA4_FLAGS, env=LITERALLY),
    "plain_gemma4_12b_pictures": Recipe([GEMMA4_FLAGS], model=_target(picture_target, GEMMA4_12B), env=LITERALLY),
    "qwen2_5_vl": _reading("Qwen2_5_VLForConditionalGeneration", f"{FOUR} {PROMPT_ROWS} 16", env=emulated_graphs()),
    # Chunks of prompts end within pictures, and the pool cannot hold all requests.
    "pictures": _reading("Qwen3VLForConditionalGeneration", f"{CHUNKS} 16 {MIXED} {CROWDED} 600 {SESSIONS}"),
    "hybrid_overlap": _tiny("Qwen3_5ForCausalLM", MIDDLE_STATES, f"{MIXED} {CROWDED} 450", env=SNAPSHOTS),
    "hybrid_graphs": _tiny("Qwen3_5ForCausalLM", MIDDLE_STATES, FOUR, env=SNAPSHOTS | emulated_graphs()),
    "plain_experts": Recipe(
        ("--tokenizer-path", TARGET, "--enable-return-routed-experts"), model=_target(written_target, MOE)
    ),
    "experts": _tiny(MOE, "--enable-return-routed-experts"),
    "plain_mistral3": Recipe(
        [STATES_SHOWN], model=_target(picture_target, "Mistral3ForConditionalGeneration"), env=NO_SCRIPTS
    ),
    "mistral3": _reading("Mistral3ForConditionalGeneration", STATES_SHOWN, env=NO_SCRIPTS),
    # Layers that keep recurrent states.
    "plain_hybrid": Recipe(
        (LETTERS, TERSE, LLGUIDANCE, STATES, STATES_SHOWN, *NO_SNAPSHOTS),
        model=_target(written_target, "Qwen3_5ForCausalLM"),
    ),
    "hybrid": Recipe(
        (_random("tiny"), LETTERS, TERSE, LLGUIDANCE, STATES, STATES_SHOWN, MIXED),
        model=_target(written_target, "Qwen3_5ForCausalLM"),
    ),
    "hybrid_pictures": _reading("Qwen3_5ForConditionalGeneration", STATES, env=WHOLE_WINDOWS),
    "smollm2": Recipe((*dspark_flags(BUNDLED), STATIC, FOUR, "--tool-call-parser qwen25"), model=_smollm2),
    "smollm2_int4": Recipe((_quantised(BUNDLED, "pack-quantized"), INT4, STATIC, FOUR), model=_smollm2),
}


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(SERVERS, tmp_path_factory.mktemp("servers"))
    try:
        yield pool
    finally:
        pool.close()


def _server(name: str) -> Callable[..., LaunchedServer]:
    @pytest.fixture(name=name)
    def get(server_pool: ServerPool) -> LaunchedServer:
        return server_pool.get(name)

    return get


for _name in SERVERS:
    globals()[f"_server_{_name}"] = _server(_name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a server into one group, those with most tests first."""
    asked = {item: SERVERS.keys() & _named_by(item) for item in items}
    groups = _joined([names - {"plain"} for names in asked.values()])
    sizes: dict[str, int] = {}
    for item, names in asked.items():
        if names:
            group = next((group for group in groups if names & group), names)
            name = "servers " + " ".join(sorted(group))
            item.add_marker(pytest.mark.xdist_group(name))
            sizes[name] = sizes.get(name, 0) + 1

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        return -sizes.get(mark.args[0], 0) if mark else 0

    items.sort(key=place)


def _named_by(item: pytest.Item) -> set[object]:
    """Return the fixtures that a test asks for: its arguments, and the one that its parameter ``name`` names."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {*getattr(item, "fixturenames", ()), parameters.get("name")}


def _joined(sets: list[set[str]]) -> list[set[str]]:
    """Return the sets with those that overlap made one."""
    joined: list[set[str]] = []
    for names in sets:
        if names:
            touching = [group for group in joined if group & names]
            joined = [group for group in joined if not group & names] + [names.union(*touching)]
    return joined
