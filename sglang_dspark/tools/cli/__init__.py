"""The command line. A command is one function in a module of this package and one line in :data:`COMMANDS`."""

import importlib

import click

from sglang_dspark import __version__
from sglang_dspark.errors import DSparkError

COMMANDS = {
    "calibrate": "sglang_dspark.tools.cli.measure:calibrate",
    "demo": "sglang_dspark.tools.cli.serve:demo",
    "doctor": "sglang_dspark.tools.cli.serve:doctor",
    "enable-cpu": "sglang_dspark.tools.cli.serve:enable_cpu",
    "evaluate": "sglang_dspark.tools.cli.measure:evaluate",
    "simulate": "sglang_dspark.tools.cli.simulate:simulate",
    "train": "dspark_training.command:train",
    "vocabulary": "sglang_dspark.tools.cli.measure:vocabulary",
}
"""Command -> ``module:function``. A module is imported when its command is run or listed, so it has to stay light:
torch, transformers and SGLang belong inside the functions."""


class CommandGroup(click.Group):
    """Commands from :data:`COMMANDS`; our own errors end the program with their message instead of a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DSparkError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="sglang-dspark")
def main() -> None:
    """Check, measure and simulate servers with DSPARK speculative decoding for SGLang, and train drafters."""
