r"""Are requests near the end of a small K/V pool answered as without DSPARK: status, text, end, counts of tokens?

    python benchmarks/pool_ends.py --lone 1000 --crowded 1000 --output RESULTS/pool_ends.json

Every kind of server has the golden pair in float32, or a tiny target with recurrent states, and a pool that is smaller
than the context; a server without DSPARK has the same. Lone requests end where the pool does or just before it, also in
the turns of a session that keeps its K/V. Crowds arrive at once and fill the pool, so that some of them are retracted:
where that happens is each server's own affair. Every difference is listed. At the end SGLang, idle, looks for slots
that were lost.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import PLUGIN, LaunchedServer, dspark_flags

TESTS = provenance.REPOSITORY / "tests"
sys.path.append(str(TESTS / "support"))

from family_targets import written_target  # noqa: E402
from random_drafter import random_drafter  # noqa: E402
from server_pool import HOST_MEMORY, NO_SNAPSHOTS, WHOLE_WINDOWS, Flags, Recipe, ServerPool, prepare_servers  # noqa: E402

GOLDEN = TESTS / "data" / "golden"
POOL = 256
VOCAB = range(3, 108)
NUMBERS_OF_TOKENS = (1, 3, 8, 16, 40, None)  # the last ends with the pool
# Requests are admitted while they fit, whatever their texts will take.
SMALL = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.01", "--context-length", "1024")
CROWD = 6
TURNS = 3
WHOLE_POOL = {"input_ids": [*VOCAB, *VOCAB], "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}

Body = dict[str, Any]
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """Servers of one kind.

    Attributes:
        ours: flags of the server with DSPARK, on top of its pair.
        both: flags of either server.
        hybrid: whether the target has recurrent states.
        draft_free: whether there is no drafter.
        sessions: whether lone requests are turns.
        longest: prompt. With pages SGLang has the last ones wait for ever.
    """

    ours: Sequence[str] = ("--speculative-dspark-schedule", "static")
    both: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    hybrid: bool = False
    draft_free: bool = False
    sessions: bool = False
    longest: int = POOL + 5


def _policy(name: str, *more: str) -> Kind:
    return Kind(("--speculative-dspark-schedule", name, *more))


KINDS = {
    "static": Kind(),
    "auto": Kind(()),
    "off": _policy("off"),
    "threshold": _policy("threshold", "--speculative-dspark-confidence-threshold", "0.6"),
    "early-stop": _policy("early-stop"),
    "no overlap": Kind(both=("--disable-overlap-schedule",)),
    "pages of 16": Kind(both=("--page-size", "16"), longest=POOL - 34),
    "long blocks": Kind((*Kind().ours, "--speculative-dspark-block-size", "15")),
    "mixed chunks": Kind(both=("--enable-mixed-chunk", "--chunked-prefill-size", "64")),
    "prompts beside drafts": Kind(
        (*Kind().ours, "--speculative-dspark-prompt-rows", "64"),
        ("--enable-mixed-chunk", "--chunked-prefill-size", "64"),
    ),
    "host cache": Kind(both=HOST_MEMORY),
    "sessions": Kind(both=("--enable-streaming-session",), sessions=True),
    "no drafter": Kind((), draft_free=True),
    "recurrent states": Kind(
        both=(*NO_SNAPSHOTS, "--max-mamba-cache-size", "48"),
        env=WHOLE_WINDOWS,
        hybrid=True,
    ),
}


def lone(draw: random.Random, longest: int) -> Body:
    """Return a request that fills the pool, or nearly."""
    return _body(draw, draw.randint(POOL - 80, longest))


def crowd(draw: random.Random) -> list[Body]:
    """Return requests that do not fit into the pool together."""
    return [_body(draw, draw.randrange(20, 140)) for _ in range(CROWD)]


def _body(draw: random.Random, length: int) -> Body:
    limit = draw.choice(NUMBERS_OF_TOKENS)
    parameters = {"temperature": 0, "ignore_eos": draw.random() < 0.8}
    body: Body = {
        "input_ids": draw.choices(VOCAB, k=length),
        "sampling_params": parameters | ({} if limit is None else {"max_new_tokens": limit}),
        "stream": draw.random() < 0.3,
    }
    options = draw.choice(({}, {}, {"preset": "summarization"}, {"enabled": False}, {"max_verify": 2}))
    return body | ({"speculation": options} if options else {})


def answer(server: LaunchedServer, body: Body) -> Answer:
    """Return what a server says to a request, as far as every server has to say the same."""
    try:
        said = server.post("/generate", body, timeout_s=60.0).decode()
    except urllib.error.HTTPError as error:
        return {"status": error.code}
    except OSError as error:
        return {"status": type(error).__name__}
    if body.get("stream"):
        parts = [part.removeprefix("data: ") for part in said.split("\n\n") if part.startswith("data: {")]
        said = parts[-1] if "data: [DONE]" in said and parts else '{"error": "cut off"}'
    found = json.loads(said)
    if "error" in found:
        return {"status": 200, "error": found["error"]}
    meta = found["meta_info"]
    counts = {name: meta.get(name) for name in ("finish_reason", "prompt_tokens", "completion_tokens")}
    if (counts["finish_reason"] or {}).get("type") == "abort":
        return {"status": 200, "finish_reason": counts["finish_reason"]}  # SGLang sends a token that means nothing
    return {"status": 200, "output_ids": found["output_ids"], **counts, "retractions": meta.get("num_retractions", 0)}


def dialogue(server: LaunchedServer, bodies: Sequence[Body]) -> list[Answer]:
    """Return the answers to the turns of a session, each of which has a part of a prompt."""
    session = server.post_json("/open_session", {"capacity_of_str_len": 10_000, "streaming": True})
    answers = [answer(server, body | {"session_params": {"id": session}}) for body in bodies]
    server.post("/close_session", {"session_id": session})
    return answers


def turns(body: Body) -> list[Body]:
    """Return the turns of a session that ends as ``body`` does, unless answers are longer than expected."""
    ids, step = body["input_ids"], 1 + len(body["input_ids"]) // TURNS
    return [body | {"input_ids": ids[begin : begin + step]} for begin in range(0, len(ids), step)]


def without_speculation(body: Body) -> Body:
    """Return what a server without DSPARK is asked in its place."""
    return {key: value for key, value in body.items() if key != "speculation"}


class Comparison:
    """What two servers have said to the same requests."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.retracted = {"ours": 0, "plain": 0}
        self.asked = 0
        self.differences: list[dict[str, Any]] = []

    def add(self, body: Body, ours: Answer, plain: Answer) -> None:
        """Compare two answers."""
        self.asked += 1
        self.statuses[str(plain["status"])] += 1
        for name, said in (("ours", ours), ("plain", plain)):
            self.retracted[name] += said.get("retractions", 0)
        if _compared(ours) != _compared(plain):
            shown = body | {"input_ids": len(body["input_ids"])}
            self.differences.append({"body": shown, "ours": _compared(ours), "plain": _compared(plain)})

    def report(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"requests": self.asked, "statuses": dict(self.statuses), "retracted": self.retracted} | {
            "differences": self.differences
        }


def _compared(said: Answer) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key != "retractions"}


def _recipe(kind: Kind, *flags: str | Callable[[Path], Flags]) -> Recipe:
    model = {"model": _hybrid} if kind.hybrid else {}
    tokenizer = ("--tokenizer-path", GOLDEN / "target") if kind.hybrid else ()
    return Recipe((*SMALL, *tokenizer, *kind.both, *flags), env=kind.env, **model)


def _hybrid(folder: Path) -> Path:
    return written_target("Qwen3_5ForCausalLM", folder / "target")


def _pair(kind: Kind, folder: Path) -> Flags:
    if kind.draft_free:
        return (*PLUGIN, "--speculative-dspark-draft-free")
    drafter = random_drafter(folder / "draft", variant="tiny") if kind.hybrid else GOLDEN / "vanilla_g7"
    return (*dspark_flags(drafter), "--speculative-dspark-sps-table-path", folder / "step_times.json")


def compare(kind: Kind, numbers: Mapping[str, int], seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Ask two servers of a kind, until the time is over."""
    until = time.monotonic() + seconds
    found = {"lone": Comparison(), "crowded": Comparison()}
    with ExitStack() as stack:
        recipes = {"ours": _recipe(kind, partial(_pair, kind), *kind.ours), "plain": _recipe(kind)}
        started = ServerPool(recipes, folder)
        stack.callback(started.close)
        servers = [started.get(name) for name in recipes]
        pools = [stack.enter_context(ThreadPoolExecutor(CROWD)) for _ in servers]
        both = stack.enter_context(ThreadPoolExecutor(2))

        def ask(groups: Iterator[list[Body]], into: Comparison, way: Callable[..., Sequence[Answer]]) -> None:
            for bodies in groups:
                if time.monotonic() > until:
                    return
                asked = [bodies, [without_speculation(body) for body in bodies]]
                ours, plain = both.map(way, servers, asked, pools)
                for triple in zip(bodies, ours, plain, strict=True):
                    into.add(*triple)

        def at_once(server: LaunchedServer, bodies: Sequence[Body], pool: ThreadPoolExecutor) -> list[Answer]:
            return list(pool.map(partial(answer, server), bodies))

        def in_session(server: LaunchedServer, bodies: Sequence[Body], pool: ThreadPoolExecutor) -> list[Answer]:
            return dialogue(server, bodies)

        draws = (random.Random(f"{seed} {place}") for place in itertools.count())
        alone = (lone(next(draws), kind.longest) for _ in range(numbers["lone"]))
        groups = (turns(body) if kind.sessions else [body] for body in alone)
        ask(groups, found["lone"], in_session if kind.sessions else at_once)
        ask((crowd(next(draws)) for _ in range(numbers["crowded"] // CROWD)), found["crowded"], at_once)
        for server in servers:
            server.flush_cache()
            answer(server, WHOLE_POOL)
        leaks = "leak" in servers[0].log_path.read_text(errors="replace")
    return {name: one.report() for name, one in found.items()} | {"lost_slots": leaks}


@click.command(help=__doc__)
@click.option("--lone", default=1000, show_default=True, help="Of each kind.")
@click.option("--crowded", default=1000, show_default=True, help="Of each kind.")
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, help="Default: all.")
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", default=20.0, show_default=True, help="Of a kind, at most.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(kinds: tuple[str, ...], seed: int, minutes: float, output: Path, **numbers: int) -> None:
    """Run the command line; see the module."""
    console, reports = Console(), {}
    prepare_servers()
    for name in kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="pool-ends-") as folder:
            reports[name] = compare(KINDS[name], numbers, seed, Path(folder), 60 * minutes)
        ways = [reports[name][way] for way in numbers]
        total = {way: f"{len(one['differences'])} of {one['requests']}" for way, one in zip(numbers, ways, strict=True)}
        console.print(name, total, "slots lost" if reports[name]["lost_slots"] else "pool whole")
        output.parent.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output, provenance.record() | {"pool": POOL, "seed": seed, "kinds": reports})
    wrong = [r for r in reports.values() if r["lost_slots"] or any(r[way]["differences"] for way in numbers)]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
