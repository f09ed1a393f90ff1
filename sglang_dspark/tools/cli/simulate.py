"""``python -m sglang_dspark simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli import simulation_tables as tables
from sglang_dspark.tools.cli.outputs import check_folders, check_outputs
from sglang_dspark.tools.cli.progress import progress_bar
from sglang_dspark.tools.cli.settings import setting, taken
from sglang_dspark.tools.simulator.crossover import CrossoverModel

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.scheduling.sps_table import SpsTable
    from sglang_dspark.tools.simulator.blocks import BlockSource
    from sglang_dspark.tools.simulator.check import Comparison
    from sglang_dspark.tools.simulator.costs import Prefill
    from sglang_dspark.tools.simulator.sweep import Conditions

_FILE = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_DPI = 150
_EXAMPLE_USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Beyond this a simulated point and a measured one do not agree.
_TOLERANCE = 0.15


def _numbers(kind: type) -> Any:
    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...]:
        try:
            numbers = tuple(kind(number) for number in value.split(",")) if value else ()
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4") from error
        if any(number <= 0 for number in numbers):
            raise click.BadParameter(f"{value!r} has a number that is not above 0")
        return numbers

    return parse


@click.command(short_help="What a server would do under a load: measured step times, acceptance, real policies.")
@click.option("--table", "table_file", type=_FILE, help="SPS table of the machine: a server's, or of profile.")
@click.option("--blocks", "blocks_file", type=_FILE, help="Recorded blocks of the drafter, of evaluate --blocks.")
@click.option("--conditional", callback=_numbers(float), help="Or acceptance by position: 0.9,0.88,0.86 ...")
@click.option("--policies", help="E.g. auto,static:3,threshold:0.6.  [default: auto,early-stop,static,off]")
@click.option("--users", callback=_numbers(int), help="Closed loop: so many users.  [default: 1,2,4,8,16]")
@click.option("--rate", "rates", callback=_numbers(float), help="Or Poisson arrivals per second, e.g. 0.5,1,2.")
@click.option("--requests", "num_requests", type=_COUNT, help="Requests per point.  [default: 4 per user, at least 32]")
@click.option("--prompt-tokens", default="128", show_default=True, help="128, 64-256 (uniform) or ~128 (geometric).")
@click.option("--output-tokens", default="~128", show_default=True, help="Likewise.")
@click.option("--prefill-ms", type=click.FloatRange(min=0), help="Of a prefill batch.  [default: from the table]")
@click.option("--prefill-token-ms", type=click.FloatRange(min=0), help="Of each of its tokens.  [default: likewise]")
@click.option("--host-ms", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of a step, beside it.")
@click.option(
    "--true-table", "true_table_file", type=_FILE, help="What steps really take; --table is what is believed."
)
@click.option(
    "--table-error", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Or by chance: of a cell."
)
@click.option("--padding/--no-padding", default=None, help="Attention padded to the longest.  [default: without tiers]")
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="SGLang's overlap scheduling.")
@click.option("--max-running", type=_COUNT, default=256, show_default=True, help="Requests that run at a time.")
@click.option("--repeats", type=_COUNT, default=2, show_default=True, help="Simulations per point, averaged.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--check", "sweep_file", type=_FILE, help="Compare with this sweep.csv of real servers instead.")
@click.option("--measured-steps", is_flag=True, help="With --check: true step times are those of its fixed lengths.")
@click.option("--published", is_flag=True, help="What the DSpark paper publishes beside what this code makes of it.")
@click.option("--example", is_flag=True, help="The crossover model instead; also what comes without --table.")
@setting("--first", CrossoverModel, "first", "Its acceptance of the first draft.")
@setting("--decay", CrossoverModel, "decay", "Its factor from draft to draft.")
@setting("--block", CrossoverModel, "block", "Its drafts per block.")
@setting("--capacity", CrossoverModel, "capacity", "Its tokens per step at no extra cost.")
@click.option("--csv", "csv_file", type=_FILE, help="Where the figures go (CSV).")
@click.option("--plot", type=_FILE, help="Where a figure goes (PNG).")
@click.option(
    "--html", type=_FILE, help="Where a page with sliders goes: the crossover model, or with --table a server."
)
@click.pass_context
def simulate(ctx: click.Context, /, **options: Any) -> None:
    """What a server would do under a load, from its step times and its drafter's acceptance.

    The scheduler's own code decides every step, in simulated time: closed-loop users or Poisson arrivals, prefills,
    overlap scheduling. Without --table a small model shows where speculation stops paying. docs/simulation.md explains.
    """
    from rich.console import Console

    console = Console(highlight=False)
    check_outputs(None, options["plot"])
    check_folders({"--csv": options["csv_file"], "--html": options["html"]})
    if options["published"]:
        _refuse(options, "--published prints tables", "csv_file", "plot", "html")
        _published(console)
    elif options["example"] or not (options["table_file"] or options["sweep_file"]):
        _refuse(
            options, "the crossover model is printed, or goes to --html; the others need --table", "csv_file", "plot"
        )
        _example(console, options)
    elif options["true_table_file"] and options["measured_steps"]:
        raise click.UsageError("--true-table and --measured-steps say the same thing; give one of them")
    elif options["measured_steps"] and not options["sweep_file"]:
        raise click.UsageError("--measured-steps takes step times from a sweep; give --check, or --true-table instead")
    elif options["sweep_file"]:
        _refuse(options, "--check takes its load from the sweep, and writes --csv", "users", "rates", "plot", "html")
        if options["table_file"] is None:
            _refuse(
                options,
                "--check without the --table of its machine takes all times and the acceptance from the sweep",
                *("conditional", "prefill_ms", "prefill_token_ms", "true_table_file", "measured_steps", "table_error"),
            )
        _check(console, options)
    else:
        _sweep(console, options)


def _refuse(options: dict[str, Any], why: str, *names: str) -> None:
    """Options that would have no effect."""
    given = [name for name in names if options[name]]
    if given:
        flags = {"csv_file": "--csv", "rates": "--rate", "true_table_file": "--true-table"}
        raise click.UsageError(f"{why}; drop {flags.get(given[0], '--' + given[0].replace('_', '-'))}")


def _example(console: Console, options: dict[str, Any]) -> None:
    model = CrossoverModel(**taken(CrossoverModel, options))
    console.print(tables.of_model(model, options["users"] or _EXAMPLE_USERS))
    console.print(_verdict(model))
    if options["html"]:
        from sglang_dspark.tools.simulator.page import crossover_page

        options["html"].write_text(crossover_page(), encoding="utf-8")
        console.print(options["html"], soft_wrap=True)


def _verdict(model: CrossoverModel) -> str:
    return (
        f"Blocks of {model.block} with a first acceptance of {model.first:g}, decay {model.decay:g}, on a machine for "
        f"{model.capacity} tokens per step: whole blocks lose to plain decoding from {model.crossover:.0f} users on."
    )


def _published(console: Console) -> None:
    from sglang_dspark.tools.simulator import published

    console.print(tables.of_accept_lengths(published.accept_lengths()))
    console.print(tables.of_thresholds(published.threshold_sweep()))
    with console.status("simulating"):
        points = published.budgets()
    console.print(tables.of_budgets(points))
    console.print("What differs, and why: docs/simulation.md")


def _sweep(console: Console, options: dict[str, Any]) -> None:
    from sglang_dspark.tools.simulator.sweep import sweep, write_csv

    if options["users"] and options["rates"]:
        raise click.UsageError("--users is a closed loop and --rate an open one; give one of them")
    if options["rates"]:
        _refuse(options, "the page of --html shows numbers of users, not --rate", "html")
    users = () if options["rates"] else options["users"] or (1, 2, 4, 8, 16)
    table, blocks = _table(options), _blocks(options)
    if blocks is None:
        raise click.UsageError("--table needs acceptance: give --blocks or --conditional")
    conditions = _conditions(options, table, blocks)
    policies = (options["policies"] or f"auto,early-stop,static:{table.gamma},off").split(",")
    with progress_bar(console, "points", len(policies) * len(users or options["rates"])) as advance:
        points = sweep(conditions, policies, users, options["rates"], advance)
    console.print(tables.of_points(points))
    prefill = conditions.costs.prefill
    caption = (
        f"{_key(table)}; {blocks.name}; prompts of {options['prompt_tokens']} tokens, answers of "
        f"{options['output_tokens']}; a prefill takes {prefill.batch_ms:.1f} ms and {prefill.token_ms:.3f} ms per token"
    )
    console.print(caption, soft_wrap=True)
    if options["csv_file"]:
        write_csv(options["csv_file"], points)
        console.print(options["csv_file"], soft_wrap=True)
    if options["html"]:
        from sglang_dspark.tools.simulator.page import simulation_page

        with progress_bar(console, "points of the page", 3 * len(users)) as advance:
            page = simulation_page(conditions, users, f"DSPARK on {_key(table)}", caption, advance)
        options["html"].write_text(page, encoding="utf-8")
        console.print(options["html"], soft_wrap=True)
    if options["plot"]:
        from sglang_dspark.tools.simulator.sweep_plot import sweep_figure

        sweep_figure(points, caption).savefig(options["plot"], dpi=_DPI)
        console.print(options["plot"], soft_wrap=True)


def _check(console: Console, options: dict[str, Any]) -> None:
    from sglang_dspark.tools.simulator.check import write_csv

    comparisons, given = (_beside_table if options["table_file"] else _beside_itself)(console, options)
    console.print(tables.of_comparisons(comparisons, _TOLERANCE))
    console.print(tables.of_predictions(comparisons))
    console.print(_agreement(comparisons, given), soft_wrap=True)
    if options["csv_file"]:
        write_csv(options["csv_file"], comparisons)
        console.print(options["csv_file"], soft_wrap=True)


def _beside_table(console: Console, options: dict[str, Any]) -> tuple[list[Comparison], str]:
    """The sweep simulated by a measured table, and what was taken from the sweep itself."""
    from sglang_dspark.tools.simulator.check import compare
    from sglang_dspark.tools.simulator.measured_sweep import host_ms, measured_table, read_sweep

    table, blocks = _table(options), _blocks(options)
    points = read_sweep(options["sweep_file"], table.key.get("dtype"))
    host = host_ms(points, table)
    true_table = measured_table(points, table, host) if options["measured_steps"] else _true_table(options)
    with progress_bar(console, "points", len(points)) as advance:
        comparisons = compare(
            points,
            table,
            blocks,
            _prefill(options, table),
            advance,
            true_table=true_table,
            table_error=options["table_error"],
            padded=options["padding"],
        )
    given = ["acceptance"] if blocks is None else []
    given += ["step times of the fixed lengths"] if options["measured_steps"] else []
    given += [f"{host:.1f} ms of a step beside the table, found at the fewest users"]
    return comparisons, ", ".join(given)


def _beside_itself(console: Console, options: dict[str, Any]) -> tuple[list[Comparison], str]:
    """The sweep simulated by its own times, and what these are."""
    from sglang_dspark.tools.simulator.blocks import RecordedBlocks
    from sglang_dspark.tools.simulator.check import compare_alone
    from sglang_dspark.tools.simulator.measured_sweep import read_sweep

    points = read_sweep(options["sweep_file"])
    recorded = RecordedBlocks.load(options["blocks_file"]) if options["blocks_file"] else None
    with progress_bar(console, "points", len(points)) as advance:
        comparisons = compare_alone(points, recorded, advance)
    return comparisons, "accept length and step times of the fixed lengths, prefills, the way to the queue, decisions"


def _agreement(comparisons: Sequence[Comparison], given: str) -> str:
    """How many points agree, and what was given to them."""
    ours = [c for c in comparisons if c.measured.policy != "plain"]
    within = sum(abs(c.error) <= _TOLERANCE for c in ours)
    deciding, fixed = ([c.error for c in ours if c.measured.decides is decides] for decides in (True, False))
    errors = [f"{median(some):+.1%} ({name})" for name, some in (("fixed", fixed), ("deciding", deciding)) if some]
    return (
        f"{within} of {len(ours)} points of DSPARK within {_TOLERANCE:.0%}; median error {', '.join(errors)}. "
        f"Taken from the sweep: {given}, and the plain server's step times, whose points check prefills and the loop "
        "alone."
    )


def _true_table(options: dict[str, Any]) -> SpsTable | None:
    from sglang_dspark.scheduling.sps_table import SpsTable

    return SpsTable.load(options["true_table_file"]) if options["true_table_file"] else None


def _table(options: dict[str, Any]) -> SpsTable:
    from sglang_dspark.scheduling.sps_table import SpsTable

    return SpsTable.load(options["table_file"])


def _blocks(options: dict[str, Any]) -> BlockSource | None:
    from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance, RecordedBlocks

    if options["blocks_file"] and options["conditional"]:
        raise click.UsageError("--blocks and --conditional say the same thing; give one of them")
    if options["blocks_file"]:
        return RecordedBlocks.load(options["blocks_file"])
    if options["conditional"]:
        rates = options["conditional"]
        return ConditionalAcceptance(rates, name="acceptance " + " ".join(f"{rate:g}" for rate in rates))
    return None


def _prefill(options: dict[str, Any], table: SpsTable) -> Prefill:
    from sglang_dspark.tools.simulator.costs import Prefill

    default = Prefill.from_table(table)
    batch_ms, token_ms = options["prefill_ms"], options["prefill_token_ms"]
    return Prefill(
        default.batch_ms if batch_ms is None else batch_ms, default.token_ms if token_ms is None else token_ms
    )


def _conditions(options: dict[str, Any], table: SpsTable, blocks: BlockSource) -> Conditions:
    from sglang_dspark.tools.simulator.costs import Costs
    from sglang_dspark.tools.simulator.sweep import Conditions
    from sglang_dspark.tools.simulator.workload import Lengths

    return Conditions(
        Costs(
            _true_table(options) or table,
            _prefill(options, table),
            options["host_ms"],
            believed=table,
            padded=not table.tiers if options["padding"] is None else options["padding"],
        ),
        blocks,
        Lengths.parse(options["prompt_tokens"]),
        Lengths.parse(options["output_tokens"]),
        **{
            name: options[name] for name in ("num_requests", "overlap", "max_running", "repeats", "seed", "table_error")
        },
    )


def _key(table: SpsTable) -> str:
    target, draft = (table.key.get(name, "?").partition(":")[0] for name in ("target", "draft"))
    return f"{target} with drafter {draft}, {table.key.get('dtype', '?')}, on {table.key.get('device', '?')}"
