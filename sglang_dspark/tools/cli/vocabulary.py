"""``python -m sglang_dspark vocabulary``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglang_dspark.tools.cli.asking import asking_options, refuse_without_template, trace_client
from sglang_dspark.tools.cli.checkpoint import Checkpoint
from sglang_dspark.tools.cli.outputs import OutputFile, progress_bars


@click.command(short_help="Choose the tokens that a drafter proposes, by the traffic of its target.")
@click.option("--target", type=Checkpoint(), required=True, help="The target model.")
@click.option(
    "--prompts",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="File of conversations or prompts; repeatable.",
)
@click.option("--url", help="A running DSPARK server of the target, which is asked the first prompts of all rows.")
@click.option("--limit", type=click.IntRange(min=1), help="With --url: ask only so many prompts of each file.")
@asking_options
@click.option("--size", type=click.IntRange(min=1), default=32_768, show_default=True, help="Tokens to propose.")
@click.option("--output", type=OutputFile(), required=True, help="JSON file of the tokens.")
def vocabulary(target: Path, files: tuple[Path, ...], size: int, output: Path, **options: Any) -> None:
    """Choose the tokens that a drafter proposes, by the traffic of its target.

    Answers are what assistants say in the conversations, and with --url what the server answers. Their tokens come
    first, then those of the users' texts. The chat template's tokens are always proposed, and what is left is filled up
    with single bytes and the tokenizer's first tokens.

    The file is for --speculative-dspark-draft-vocabulary. A shorter list makes drafting cheaper, and ends a draft
    wherever the target says something else; texts are the same.
    """
    refuse_without_template(options)

    from rich.console import Console
    from transformers import AutoTokenizer

    from sglang_dspark.draft.reduced_vocabulary import save_token_ids
    from sglang_dspark.errors import ConfigError
    from sglang_dspark.tools.prompts import conversations_of, read_answers, read_prompts
    from sglang_dspark.tools.tables import read_rows
    from sglang_dspark.tools.vocabulary import Tokens, Traffic, coverage

    console = Console(highlight=False)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokens = Tokens.of(tokenizer, target)
    if not len(tokens.special) < size <= tokens.number:
        raise ConfigError(
            f"--size {size}: the target has {tokens.number} tokens, {len(tokens.special)} of them special; give more "
            f"than {len(tokens.special)} and at most {tokens.number}"
        )

    def ids_of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    asked = [turn for file in files for turns in conversations_of(read_rows(file), str(file)) for turn in turns]
    answers = ids_of([text for file in files for text in read_answers(file)])
    if options["url"] is not None:
        prompts = [prompt for file in files for prompt in read_prompts(file, options["limit"])]
        with progress_bars(console, {"prompts": len(prompts)}) as (advance,):
            done = trace_client(options).ask_all(prompts, options["concurrency"], advance)
        answers += [answer.tokens for answer in done]
    traffic = Traffic(answers, ids_of(asked))
    chosen = traffic.choose(tokens, size)
    save_token_ids(output, chosen)
    of_all, of_others = coverage(chosen, answers), traffic.held_out_coverage(tokens, size)
    says = f"{size:,} of {tokens.number:,} tokens, from {len(answers):,} answers and {len(asked):,} texts of users."
    if of_all is not None:
        says += f" They are {of_all:.2%} of the answers' tokens."
    if of_others is not None:
        says += f" A list from nine tenths of the answers has {of_others:.2%} of the tokens of the others."
    console.print(says)
    console.print(f"\n--speculative-dspark-draft-vocabulary {output}", soft_wrap=True)
