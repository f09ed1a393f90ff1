"""Tries DSPARK on this machine: twenty texts of a plain server and of one with a pair, times of steps, a forecast.

The servers run one after the other, so that each has the machine for itself. What was found is also a report for others
to read: it has no path, no prompt and no name of a host.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError

import torch
from rich.console import Console
from rich.markup import escape

from sglang_dspark import __version__
from sglang_dspark.errors import ConfigError, DSparkError, LaunchError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.cli.options import new_table
from sglang_dspark.tools.demo import PROMPTS, has_chat_template
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags
from sglang_dspark.tools.simulator.server import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, sweep
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths
from sglang_dspark.tools.tiny_pair import VOCABULARY, write_tiny_pair

Answer = dict[str, Any]
"""What ``POST /generate`` returns."""

KIND = "sglang-dspark doctor --try"
"""First entry of a report."""
GPU_FLAGS = ("--max-running-requests", "64", "--max-total-tokens", "65536")
SELF_CHECK = ("--speculative-dspark-self-check",)
"""Flags that have a server on a GPU check its kernels."""
POLICIES = ("static", "auto")
"""The first one verifies whole blocks, whatever that costs here."""
USERS = (1, 8, 64)
MAX_TOKENS, ALONE, TOGETHER = 48, 4, 8
"""Most tokens of an answer; how many texts are asked for one at a time, and how many of the others at once."""
NEAR_TIE = 0.25
"""Gap in log-probability up to which rounding explains another token in 16 bits: of two logits between 16 and 32 in
bfloat16, each is a multiple of 1/8, and rows of another shape may round each by one such step. In float32 nothing
is explained: there, steps of that size are a million times smaller."""
_TOP = 5  # tokens of which the plain server tells the log-probability: several may be nearly tied
# Who may reach a server, which only this command asks.
_REACHED_BY = ("--host", "--port", "--api-key", "--admin-api-key", "--ssl-")


class Trial:
    """One trial on this machine's GPU, or on its CPU.

    Args:
        pair: folders of target and drafter; None for a tiny pair of random weights.
        flags: of ``sglang.launch_server``, for both servers; those that begin with ``--speculative-`` only for ours.
        log_dir: folder of the servers' logs.

    Attributes:
        report: what has been found so far, as JSON.
    """

    def __init__(
        self, console: Console, pair: tuple[Path, Path] | None, flags: Sequence[str], *, log_dir: Path
    ) -> None:
        self._console, self._pair, self._log_dir = console, pair, log_dir
        self._on_gpu = torch.cuda.is_available()
        groups = [group for group in grouped(flags) if not group[0].startswith(_REACHED_BY)]
        self._ours = [word for group in groups if group[0].startswith("--speculative-") for word in group]
        dtype = "bfloat16" if self._on_gpu else "float32"
        self._common = [
            *(GPU_FLAGS if self._on_gpu else CPU_FLAGS),
            *(() if self._on_gpu and pair else ("--dtype", dtype)),
            *(() if pair else ("--skip-tokenizer-init",)),
            *(word for group in groups if not group[0].startswith("--speculative-") for word in group),
        ]
        self.report: dict[str, Any] = {
            "report": KIND,
            "commit": provenance.commit(),
            "versions": provenance.versions() | {"sglang-dspark": __version__},
            "hardware": provenance.hardware(),
            "pair": "named" if pair else "tiny, random weights",
            "flags": [provenance.shown_flag(group) for group in groups],
            **dict.fromkeys(("server", "texts", "users", "error")),
        }

    def run(self) -> bool:
        """Start the servers, ask and print everything; return whether no text is different.

        Raises:
            DSparkError: a server did not start, refused a request or died.
        """
        with TemporaryDirectory() as scratch:
            target, draft = self._pair or write_tiny_pair(Path(scratch))
            table_path = Path(scratch) / "step_times.json"
            prompts = named_prompts(target) if self._pair else tiny_prompts()
            with self._served("plain", target) as server:
                expected = ask(server, prompts, return_logprob=True, top_logprobs_num=_TOP)
            flags = (*dspark_flags(draft), *self._ours, "--speculative-dspark-sps-table-path", str(table_path))
            with self._served("dspark", target, *flags, *(SELF_CHECK if self._on_gpu else ())) as server:
                conditional = self._compare(server, prompts, expected)
            if table_path.exists():  # not if the server was started with a policy that needs no times
                self._forecast(SpsTable.load(table_path), conditional)
        return not any(found["different"] for found in self.report["texts"].values())

    @contextmanager
    def _served(self, name: str, target: Path, *flags: str) -> Iterator[LaunchedServer]:
        env, log_path = {} if self._on_gpu else CPU_ENV, self._log_dir / f"try-{name}.log"
        server = LaunchedServer(target, *self._common, *flags, env=env, log_path=log_path)
        try:
            with ExitStack() as stack:
                with self._console.status(f"starting the {name} server"):
                    stack.enter_context(server)
                said = f"{name} server ready after {server.startup_s:.0f} s; log: {log_path}"
                self._console.print(f"[dim]{escape(said)}[/]", soft_wrap=True)
                yield server
        except (LaunchError, OSError) as error:
            # SGLang prints all of its arguments in one line, keys and names too.
            log = [line for line in server.log_tail().splitlines() if "server_args=" not in line]
            said = f"{error}: {error.read().decode(errors='replace')}" if isinstance(error, HTTPError) else str(error)
            refused = [] if isinstance(error, LaunchError) else [said]
            self.report["error"] = {"server": name, "lines": [*refused, *log]}
            if isinstance(error, LaunchError):
                raise
            raise DSparkError(f"the {name} server did not answer: {said}; its log is in {log_path}") from error

    def _compare(
        self, server: LaunchedServer, prompts: Sequence[Sequence[int]], expected: Sequence[Answer]
    ) -> list[float]:
        """Ask under each policy, judge the texts, and return the share of drafts kept of those that were reached."""
        capabilities = server.get_json("/dspark/capabilities")
        if not capabilities["policies"]:
            raise DSparkError(f"the target decodes without drafts: {capabilities['reason']}")
        capabilities["target"].pop("name")
        self.report["server"] = {key: value for key, value in capabilities.items() if key != "policies"}
        near_tie = 0.0 if capabilities["dtype"] == "float32" else NEAR_TIE
        table = new_table("policy", "equal", "near-tie", "different", "drafts\nverified", "kept", "tokens\nper step")
        conditional: list[float] = []
        self.report["texts"] = {}
        for policy in [name for name in POLICIES if capabilities["policies"][name]["available"]]:
            server.post_json("/dspark/policy", {"policy": policy})
            server.flush_cache()
            before = server.get_json("/dspark/stats")
            texts = [answer["output_ids"] for answer in ask(server, prompts)]
            after = server.get_json("/dspark/stats")
            counts = {key: after[key] - before[key] for key in _COUNTS}
            found = self.report["texts"][policy] = {**judged(expected, texts, near_tie), **counts}
            lengths = f"{counts['committed_tokens'] / max(counts['rounds'], 1):.2f}"
            shown = (found[key] for key in ("equal", "near_tie", "different", "verified_tokens", "accepted_tokens"))
            table.add_row(policy, *map(str, shown), lengths)
            conditional = conditional or [rate or 0.0 for rate in after["conditional_acceptance"]]
        self._console.print(f"\n{len(prompts)} texts on {escape(capabilities['device'])}, {capabilities['dtype']}:")
        self._console.print(table)
        if check := capabilities.get("self_check"):
            self._console.print(
                f"{check['kernels']} kernels agree with PyTorch in {check['forms']} forms, and {check['graphs']} CUDA "
                f"graphs with eager steps; calls left for the next start: {check['left_for_next_start']}"
            )
        if not any(found["verified_tokens"] for found in self.report["texts"].values()):
            raise DSparkError("no draft was verified, so nothing was tried; drop --speculative-dspark-schedule off")
        return conditional

    def _forecast(self, table: SpsTable, conditional: Sequence[float]) -> None:
        """Print step times, and what ``auto`` would do with several users, as far as the table reaches."""
        reached = [users for users in USERS if users <= table.requests[-1]]
        # How well the confidence head tells drafts apart has not been measured: all count as likely as their mean.
        blocks = ConditionalAcceptance(tuple(conditional), concentration=inf)
        lengths = (Lengths.parse("128"), Lengths.parse("~128"))
        conditions = Conditions(Costs(table, Prefill.from_table(table)), blocks, *lengths)
        with self._console.status("simulating users"):
            off, auto = (sweep(conditions, [policy], reached) for policy in ("off", "auto"))
        most = table.gamma
        headings = ("step ms\n0 drafts", f"step ms\n{most} drafts", "drafts\nby auto", "tok/s each\noff", "auto")
        shown = new_table("users", *headings, "times")
        self.report["users"] = []
        for plain, point in zip(off, auto, strict=True):
            users = point.users
            plain_ms, whole_ms = (table.step_ms(users, users * (1 + n), n, table.contexts[0]) for n in (0, most))
            off_tok_s, auto_tok_s = plain.figures.user_tok_s, point.figures.user_tok_s
            figures = {
                "plain_step_ms": plain_ms,
                "whole_blocks_step_ms": whole_ms,
                "verify_length": point.figures.verify_len,
                "off_tok_s": off_tok_s,
                "auto_tok_s": auto_tok_s,
            }
            self.report["users"].append({"users": users, **{name: round(x, 2) for name, x in figures.items()}})
            shown.add_row(str(users), *(f"{x:.1f}" for x in figures.values()), f"{auto_tok_s / off_tok_s:.2f}")
        self._console.print(shown)
        self._console.print(
            f"Step times were measured with {table.contexts[0]} tokens of context. Speeds are simulated from them and "
            "from the share of drafts kept above."
        )
        if beyond := [str(users) for users in USERS if users not in reached]:
            self._console.print(
                f"Nothing is said about {' and '.join(beyond)} users: steps were timed with up to {table.requests[-1]} "
                f"requests, and --max-running-requests is {self.report['server']['max_running_requests']}."
            )


def try_here(
    console: Console, pair: tuple[Path, Path] | None, flags: Sequence[str], *, report_path: Path, log_dir: Path
) -> bool:
    """Run a :class:`Trial`, write its report whatever happens, and return whether no text is different.

    Raises:
        DSparkError: as :meth:`Trial.run`.
    """
    pair = pair and (pair[0].absolute(), pair[1].absolute())  # so that no name in a text is taken for one of them
    trial = Trial(console, pair, flags, log_dir=log_dir)
    try:
        return trial.run()
    finally:
        names = {str(pair[0]): "TARGET", str(pair[1]): "DRAFT"} if pair else {}
        provenance.write_json(report_path, provenance.without_names(trial.report, names))
        console.print(
            f"Report, without paths, prompts and names of machines: {report_path}", soft_wrap=True, markup=False
        )


_COUNTS = ("rounds", "verified_tokens", "accepted_tokens", "committed_tokens")


def ask(server: LaunchedServer, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Answer]:
    """Return greedy answers: to the first few prompts one at a time, to the others several at once."""
    sampling = {"temperature": 0.0, "max_new_tokens": MAX_TOKENS}

    def answer(prompt: Sequence[int]) -> Answer:
        body = {"input_ids": list(prompt), "sampling_params": sampling, **fields}
        given: Answer = server.post_json("/generate", body)
        return given

    with ThreadPoolExecutor(TOGETHER) as pool:
        return [*map(answer, prompts[:ALONE]), *pool.map(answer, prompts[ALONE:])]


def judged(expected: Sequence[Answer], texts: Sequence[Sequence[int]], near_tie: float) -> dict[str, Any]:
    """Compare texts with the plain server's.

    Args:
        expected: its answers, with log-probabilities of the likeliest tokens.
        texts: token ids of the other server's answers.
        near_tie: gap in log-probability up to which another token is no fault.

    Returns:
        How many are ``equal``, split at a ``near_tie`` or ``different``; the ``splits``, each with its position and
        gap, null if it is not known; and the ``tokens`` that were compared, of each text up to its split.
    """
    found: dict[str, Any] = {"equal": 0, "near_tie": 0, "different": 0, "tokens": 0, "splits": []}
    for number, (answer, ids) in enumerate(zip(expected, texts, strict=True)):
        position, gap = _split(answer, ids)
        found["tokens"] += position
        if gap is None:
            found["equal"] += 1
            continue
        found["near_tie" if gap <= near_tie else "different"] += 1
        gap_or_null = None if gap == inf else round(gap, 6)
        found["splits"].append({"text": number, "position": position, "gap": gap_or_null})
    return found


def _split(answer: Answer, ids: Sequence[int]) -> tuple[int, float | None]:
    """Return the first position where a text differs, and how far below the best token there the lower one lies.

    The gap is None if nothing differs, and infinite if a text merely ends earlier or its token is an unlikely one.
    """
    own = answer["output_ids"]
    differing = (place for place, (one, other) in enumerate(zip(own, ids, strict=False)) if one != other)
    if (position := next(differing, None)) is None:
        return min(len(own), len(ids)), None if len(own) == len(ids) else inf
    top = {token: logprob for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][position]}
    return position, max(top.values()) - min(top.get(token, -inf) for token in (own[position], ids[position]))


def grouped(flags: Sequence[str]) -> list[list[str]]:
    """Return the words of each flag: itself, and its values."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def tiny_prompts() -> list[list[int]]:
    """Return twenty prompts of 8 to 160 tokens for the tiny pair."""
    draw = random.Random(0)
    return [[draw.randrange(1, VOCABULARY) for _ in range(8 * number)] for number in range(1, 21)]


def named_prompts(target: Path) -> list[list[int]]:
    """Return twenty prompts as tokens of the target, in its chat template if it has one.

    Raises:
        ConfigError: its folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--target {target}: --try needs its tokenizer, which cannot be read: {error}") from error
    texts = [*PROMPTS, *(f"Answer in three sentences. {prompt}" for prompt in PROMPTS)]
    if not has_chat_template(target):
        return [tokenizer(text)["input_ids"] for text in texts]
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
