"""``python -m sglang_dspark simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource
from msgspec import Meta

from sglang_dspark.declared import int_range
from sglang_dspark.tools.cli.options import Numbers, OutputFile, new_table, progress_bars, write_csv

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.tools.simulator.sweep import Conditions, Point
    from sglang_dspark.tools.simulator.workload import BlockSource


_SHARE = Annotated[float, Meta(gt=0, le=1, description="must be above 0 and at most 1")]


@click.command(short_help="Estimate, without a server, from how many users on speculation stops to pay.")
@click.option("--table", type=click.Path(path_type=Path), help="SPS table of a server, which has its step times.")
@click.option(
    "--blocks",
    "blocks_file",
    type=click.Path(path_type=Path),
    help="With --table: recorded rounds of the drafter, from evaluate --blocks.",
)
@click.option(
    "--conditional",
    type=Numbers(_SHARE),
    help="In place of --blocks: acceptance by position, e.g. 0.9,0.88,0.86. The last number counts for the rest.",
)
@click.option("--policies", help="Policies besides off, e.g. static:3,threshold:0.6,auto.  [default: static,auto]")
@click.option(
    "--users",
    type=Numbers(Annotated[int, int_range(1)]),
    help="Numbers of users, ascending.  [default: those of the table]",
)
@click.option(
    "--prompt-tokens",
    default="128",
    show_default=True,
    help="Length of a prompt: 128, 64-256 (uniform) or ~128 (geometric).",
)
@click.option("--output-tokens", default="~128", show_default=True, help="Length of an answer, in the same forms.")
@click.option(
    "--slo",
    type=click.FloatRange(min=0, min_open=True),
    help="Give every second user an SLO of this share of the mean time per token under auto, and count those met.",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(min=1),
    help="Requests to simulate for each number of users.  [default: four of each user, six with --slo]",
)
@click.option("--mixed-chunk", is_flag=True, help="As the server's flag --enable-mixed-chunk.")
@click.option(
    "--prompt-rows",
    type=click.IntRange(min=0),
    help="As the server's flag --speculative-dspark-prompt-rows.  [default: as many as step times allow]",
)
@click.option(
    "--max-gap-ms", type=click.FloatRange(min=1), help="As the server's flag --speculative-dspark-max-gap-ms."
)
@click.option(
    "--long-prompt",
    type=click.IntRange(min=1),
    help="Add a user who sends prompts of this length until the others are served.",
)
@click.option(
    "--prefill",
    type=Numbers(Annotated[float, Meta(ge=0, description="must be at least 0")]),
    help="Milliseconds of a prefill, of each of its tokens, and of each pair of a token and one before it, e.g. "
    "6.5,0.02,1e-6.  [default: estimated from --table]",
)
@click.option("--csv", "csv_file", type=OutputFile(), help="Write the figures to this CSV file.")
@click.option("--html", type=OutputFile(), help="Write a page with sliders to this HTML file.")
@click.pass_context
def simulate(ctx: click.Context, /, **options: Any) -> None:
    """Estimate, without a server, from how many users on speculation stops to pay.

    With --table, a server is simulated from measured step times and its drafter's acceptance. The scheduler's own code
    decides every step; each user sends the next request when the last answer is complete. Without --table, a small
    model shows the principle. docs/simulation.md explains both.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if options["table"] is None:
        for param in ctx.command.params:  # others would have no effect
            given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
            if given and param.name not in ("users", "html"):
                raise click.UsageError(f"{param.opts[0]} needs --table; give both, or drop {param.opts[0]}")
        _model(console, options)
    else:
        _simulate(console, options)


def _model(console: Console, options: dict[str, Any]) -> None:
    from sglang_dspark.tools.simulator.sweep import MODEL_USERS, POLICIES, CrossoverModel, crossover_page

    model = CrossoverModel()
    headings = ("policy", "users", "one user's\nspeed", "times\nplain", "accept\nlength", "verified\ndrafts", "wasted")
    table = new_table(*headings, left=["policy"])
    for policy in POLICIES:
        for users in options["users"] or MODEL_USERS:
            point, plain = model.point(policy, users), model.point("plain", users)
            figures = (point.user_speed, point.user_speed / plain.user_speed, point.accept_length)
            shown = (f"{figure:.2f}" for figure in figures)
            table.add_row(policy, str(users), *shown, str(point.verify_len), f"{point.wasted:.0%}")
        table.add_section()
    console.print(table)
    console.print(
        f"A model: blocks of {model.block} drafts, of which the first is accepted with probability {model.first:g} and "
        f"each next one {model.decay:g} times as likely, on a machine that computes {model.capacity} tokens per step "
        f"at no extra cost. From {model.crossover:.0f} users on, whole blocks (fixed) are slower than plain decoding. "
        "To simulate a server of yours, give --table."
    )
    if options["html"]:
        options["html"].write_text(crossover_page(), encoding="utf-8")
        console.print(options["html"], soft_wrap=True)


def _simulate(console: Console, options: dict[str, Any]) -> None:
    from sglang_dspark.scheduling.sps_table import SpsTable
    from sglang_dspark.tools.simulator.server import Costs, Prefill
    from sglang_dspark.tools.simulator.sweep import Conditions, crossovers, sweep
    from sglang_dspark.tools.simulator.workload import Lengths

    table = SpsTable.load(options["table"])
    blocks = _blocks(options, table.gamma)
    if options["prefill"] and len(options["prefill"]) > 3:
        raise click.UsageError("--prefill takes at most three numbers: of a prefill, of a token, of a pair of tokens")
    prefill = Prefill(*options["prefill"]) if options["prefill"] else Prefill.from_table(table)
    conditions = Conditions(
        Costs(table, prefill),
        blocks,
        Lengths.parse(options["prompt_tokens"]),
        Lengths.parse(options["output_tokens"]),
        **{name: options[name] for name in ("num_requests", "mixed_chunk", "prompt_rows", "max_gap_ms", "long_prompt")},
    )
    users = sorted(set(options["users"] or table.requests))
    policies = list(dict.fromkeys(["off", *(options["policies"] or "static,auto").split(",")]))
    if options["slo"] is not None:
        _simulate_slo(console, options, conditions, users)
        return
    with progress_bars(console, {"points": len(policies) * len(users)}) as (advance,):
        points = sweep(conditions, policies, users, advance)
    _print_points(console, points)
    [_, *found] = crossovers(points).items()
    for policy, crossover in found:
        says = f"is not slower than off with {points[-1].users} users, the most that were simulated."
        if crossover:
            says = f"is slower than off from {math.ceil(crossover)} users on."
        console.print(f"{policy} {says}", soft_wrap=True)
    if options["csv_file"]:
        rows = [{"policy": point.policy, "users": point.users, **asdict(point.figures)} for point in points]
        write_csv(options["csv_file"], rows)
        console.print(options["csv_file"], soft_wrap=True)
    if options["html"]:
        from sglang_dspark.tools.simulator.sweep import simulation_page

        key = (table.key.get(name, "").partition(":")[0] for name in ("target", "draft", "dtype", "device"))
        server = ", ".join(part for part in key if part)
        prompts = f"prompts of {options['prompt_tokens']} tokens, answers of {options['output_tokens']}"
        page = simulation_page(points, "A simulated server", f"{server}; {blocks.name}; {prompts}.")
        options["html"].write_text(page, encoding="utf-8")
        console.print(options["html"], soft_wrap=True)


def _simulate_slo(console: Console, options: dict[str, Any], conditions: Conditions, users: Sequence[int]) -> None:
    from sglang_dspark.tools.simulator.sweep import simulate_slo

    for name in ("policies", "html"):
        if options[name]:
            raise click.UsageError(f"--slo compares auto with and without SLOs, in a table only; drop --{name}")
    points = [simulate_slo(conditions, count, options["slo"]) for count in users]
    headings = ("SLO\nms", "met", "met\nwithout", "tok/s\ntimes", "others'\nTPOT", "TPOT\nwithout")
    table = new_table("users", *headings)
    for point in points:
        times = (f"{point.other_tpot_ms:.1f}", f"{point.other_tpot_before_ms:.1f}")
        met = (f"{point.met:.0%}", f"{point.met_before:.0%}")
        table.add_row(str(point.users), f"{point.tpot_ms:.1f}", *met, f"{point.speed:.2f}", *times)
    console.print(table)
    console.print(
        "Every second user has the SLO. met: share of their answers that keep it. without: the same figure if no user "
        "has an SLO. tok/s times: tokens per second of all users, compared with that. others' TPOT: milliseconds per "
        "token of the users without an SLO."
    )
    if options["csv_file"]:
        write_csv(options["csv_file"], [asdict(point) for point in points])
        console.print(options["csv_file"], soft_wrap=True)


def _blocks(options: dict[str, Any], gamma: int) -> BlockSource:
    from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, RecordedBlocks

    if options["blocks_file"] and options["conditional"]:
        raise click.UsageError("--blocks and --conditional both give the acceptance; give only one of them")
    if options["blocks_file"]:
        return RecordedBlocks.load(options["blocks_file"])
    if options["conditional"]:
        given = options["conditional"]
        rates = (*given, *[given[-1]] * (gamma - len(given)))
        return ConditionalAcceptance(rates, name="acceptance " + " ".join(f"{rate:g}" for rate in rates))
    raise click.UsageError("--table needs acceptance: give --blocks or --conditional")


def _print_points(console: Console, points: Sequence[Point]) -> None:
    headings = ("tok/s", "one\nuser", "TTFT\nms", "TPOT\nms", "max\ngap", "accept\nlen.", "verify", "wasted", "parked")
    table = new_table("policy", "users", *headings, left=["policy"])
    table.padding = 0  # to fit into 80 columns
    for point in points:
        f = point.figures
        if point.users == points[0].users:
            table.add_section()
        figures = (f.output_tok_s, f.user_tok_s, f.ttft_ms, f.tpot_ms, f.gap_max_ms)
        shown = (f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" for figure in figures)
        drafts = (f"{f.accept_length:.2f}", f"{f.verify_len:.2f}", f"{f.wasted:.0%}", f"{f.parked:.0%}")
        table.add_row(point.policy, str(point.users), *shown, *drafts)
    console.print(table)
    console.print(
        "tok/s: of all users. one user: tokens per second of each. max gap: longest wait for a token, in ms. accept "
        "len.: tokens per request and step. verify: drafts verified per request and step; wasted: share of these that "
        "was rejected. parked: share of the steps without drafts."
    )
