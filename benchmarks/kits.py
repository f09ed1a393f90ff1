"""SGLang's own test kits against a server with DSPARK and, before it, against the server without.

    python benchmarks/kits.py --target T --draft D --output kits.json

A kit is a class of tests that SGLang ships for any server that it is mixed with. What passes on the plain server has to
pass with DSPARK, or be refused by name (:data:`REFUSED`); anything else makes the exit status 1. Some tests ask for
facts that a small target does not know, and fail on both. Only one server runs at a time.
"""

from __future__ import annotations

import json
import pkgutil
import sys
import traceback
import unittest
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import openai
import sglang.test
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test import kits, kl_test_utils
from sglang.test.kits import basic_scheduler_stress_kit, cache_hit_kit, radix_cache_server_kit, spec_server_kits
from sglang.test.server_fixtures import spec_eagle_fixture

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

# A plain server has no other grammars on a CPU.
FLAGS = (*CPU_FLAGS, "--dtype", "float32", "--grammar-backend", "llguidance")
DSPARK = ("--speculative-dspark-schedule", "static")

LEFT_OUT = {
    "need data sets": (
        *("eval_accuracy_kit", "lm_eval_kit", "AccuracyTwoPassMixin"),
        *("SpecAccuracyKit", "SpecPerfKit", "test_gsm8k"),
    ),
    "need a GPU, or several servers": ("dsa_metadata_kit", "fwd_occupancy_kit", "pd_parity_kit"),
    "need a target that sees, reasons or has a state": (
        *("mmmu_vlm_kit", "vlm_perf_kit", "reasoning_kit", "prefix_cache_branching_kit"),
    ),
    "starts a server to compare texts with, as benchmarks/identity.py does": ("SpecParityKit",),
    "has no end with a small target": ("test_constrained_decoding",),
    "measure speed": ("perf_bench_kit", "spec_decoding_kit"),
    "--enable-streaming-session is refused at start-up": ("streaming_session_kit",),
    "--enable-return-hidden-states is refused at start-up": ("SpecHiddenStatesKit",),
}
"""Modules, kits and tests that are not run, by the reason."""
NOT_RUN = frozenset(name for names in LEFT_OUT.values() for name in names)

REFUSED = {"test_sampling_mask": "return_sampling_mask"}
"""Tests of what requests with DSPARK are refused, and the field that the answer names."""

MOST_ATTEMPTS = 3

SERVERS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "WaitingTimeoutMixin": (("--max-running-requests", "1"), {"SGLANG_REQ_WAITING_TIMEOUT": "2"}),
    "RunningTimeoutTwoWaveMixin": ((), {"SGLANG_REQ_RUNNING_TIMEOUT": "3"}),
}
"""Flags and environment of kits that need servers of their own."""

# What a small model on a CPU answers within minutes, and no data set.
SIZES = {
    "abort_all_max_new_tokens": 2000,
    "pause_num_requests": 16,
    "pause_max_new_tokens": 64,
    "pause_ignore_eos": True,
    "pause_duration": 2,
    "kl_div_thres": 0.01,
    "kl_div_max_samples": 4,
    "kl_div_prefill_max_new_tokens": 64,
    "kl_div_decode_max_new_tokens": 64,
    "max_new_tokens": 64,
    "num_groups": 2,
    "branches_per_group": 2,
    "prefix_len": 128,
    "acc_length_thres": 1.3,
    "batch_accept_len_thres": 1.3,
}
cache_hit_kit.sample_random_requests = partial(cache_hit_kit.sample_random_requests, random_sample=False)
radix_cache_server_kit.gen_radix_tree = partial(radix_cache_server_kit.gen_radix_tree, 30, 64)
spec_eagle_fixture.PROMPTS[:-2] = []
basic_scheduler_stress_kit._REQUEST_TIMEOUT = 600  # noqa: SLF001
RUN_LOGPROB_CHECK = spec_server_kits.run_logprob_check
spec_server_kits.run_logprob_check = lambda case, shape: shape[0] > 500 or RUN_LOGPROB_CHECK(case, shape)


class CacheHits:
    """A kit that the wheel has as a function."""

    def test_multiturn_cache_hit(self: Any) -> None:
        cache_hit_kit.run_multiturn_cache_hit_test(self.base_url, self.model, num_clients=4)


def kits_of_wheel() -> Iterator[type]:
    """Yield the kits that are run."""
    yield CacheHits
    for module in pkgutil.iter_modules(kits.__path__):
        if module.ispkg or module.name in NOT_RUN:
            continue
        loaded = import_module(f"{kits.__name__}.{module.name}")
        for found in vars(loaded).values():
            if isinstance(found, type) and found.__module__ == loaded.__name__ and found.__name__ not in NOT_RUN:
                yield found


def attributes(server: LaunchedServer, target: Path) -> dict[str, Any]:
    """Return what kits read of the class that they are mixed into."""
    tokenizer, fixture = get_tokenizer(str(target)), spec_eagle_fixture.SpecEagleServerBase
    text = tokenizer.encode((Path(sglang.test.__path__[0]) / "long_prompt.txt").read_text())
    ids = [text[start : start + 256] for start in range(0, 1024, 256)]
    kl_test_utils.get_input_ids = lambda **given: ids
    return {
        "base_url": server.url,
        "process": SimpleNamespace(poll=lambda: server.exit_status),
        "client": openai.Client(api_key="EMPTY", base_url=f"{server.url}/v1"),
        "model": str(target),
        "api_key": "EMPTY",
        "tokenizer": tokenizer,
        "input_ids": ids,
        **{name: getattr(fixture, name) for name in ("send_request", "send_requests_abort", "run_decode")},
        **SIZES,
    }


def outcomes(kit: type, server: LaunchedServer, target: Path) -> Iterator[tuple[str, str, int]]:
    """Yield each test, why it failed, which is empty if it passed, and how often it was tried: texts may be sampled."""
    case: Any = type(kit.__name__, (kit, unittest.TestCase), attributes(server, target))
    for name in unittest.TestLoader().getTestCaseNames(case):
        if name in NOT_RUN:
            continue
        attempts, why = 0, "not tried"
        while why and attempts < MOST_ATTEMPTS:
            attempts, why = attempts + 1, failure(case(name), server)
            click.echo(f"{kit.__name__}.{name}: {why or 'passed'}")
        yield name, why, attempts


def failure(case: unittest.TestCase, server: LaunchedServer) -> str:
    """Run a test and return why it failed; nothing if it passed."""
    try:
        server.flush_cache()  # waits for what the last test has left behind
        with redirect_stdout(sys.stderr):
            unittest.TestSuite([case]).debug()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def wrong(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tests that failed with DSPARK alone, but for features that are refused by name."""
    failed = [row for row in rows if row.get("ours") and not row.get("plain")]
    return [
        f"{row['kit']}.{row['test']}: {row['ours']}"
        for row in failed
        if row["test"] not in REFUSED or REFUSED[row["test"]] not in row["ours"]
    ]


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--only", multiple=True, default=[""], help="Run kits with this in their name.")
@click.option("--server", "columns", type=click.Choice(["plain", "ours"]), multiple=True, default=["plain", "ours"])
def main(target: Path, draft: Path, output: Path, only: Sequence[str], columns: Sequence[str]) -> None:
    """Run every kit on both servers and write what failed where, and why.

    An output that exists is kept, but for what is run: one run may go on where another one stopped.
    """
    document = json.loads(output.read_text()) if output.exists() else {"runs": [], "tests": []}
    rows = {(row["kit"], row["test"]): row for row in document["tests"]}
    document |= {"runs": [*document["runs"], {**provenance.record(), "flags": FLAGS}], "left_out": LEFT_OUT}
    added = {"plain": (), "ours": (*dspark_flags(draft), *DSPARK)}
    kits_of: dict[str, list[type]] = defaultdict(list)
    for kit in kits_of_wheel():
        if any(text in kit.__name__ for text in only):
            kits_of[kit.__name__ if kit.__name__ in SERVERS else ""].append(kit)
    for column, (own, chosen) in product(columns, kits_of.items()):
        flags, env = SERVERS.get(own, ((), {}))
        with LaunchedServer(target, *FLAGS, *flags, *added[column], env={**CPU_ENV, **env}) as server:
            for kit in chosen:
                for test, why, attempts in outcomes(kit, server, target):
                    row = rows.setdefault((kit.__name__, test), {"kit": kit.__name__, "test": test})
                    row |= {column: why.replace(str(target), "TARGET"), f"{column}_attempts": attempts}
                provenance.write_json(output, {**document, "tests": list(rows.values())})
    if failures := wrong(list(rows.values())):
        raise click.ClickException("\n".join(["these tests fail with DSPARK alone:", *failures]))


if __name__ == "__main__":
    main()
