"""Options and the configurations that they fill agree."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from dspark_training.command import train
from dspark_training.settings import TextPlan, TrainConfig
from msgspec import Meta

from sglang_dspark.declared import int_range
from sglang_dspark.tools.cli.settings import setting, taken

# What the command decides from other options, or from the target, where the user does not say.
DECIDED = {"invent", "compute_dtype", "mask_token_id"}


@dataclass
class Shape:
    size: Annotated[int, int_range(1, 8)] = 3
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    form: Literal["round", "square"] = "round"
    depth: Annotated[int, int_range(0)] | None = None


@click.command()
@setting("--width", Shape, "size", "How wide.")
@setting("--share", Shape, "share", "How much.")
@setting("--form", Shape, "form", "Which.")
@setting("--depth", Shape, "depth", "How deep.")
def shape(**options):
    click.echo(Shape(**taken(Shape, options)))


def run(*arguments):
    return CliRunner().invoke(shape, arguments)


def test_an_option_has_the_default_of_its_field():
    assert run().output.strip() == str(Shape())
    assert run("--width", "8", "--share", "0.1", "--form", "square", "--depth", "0").output.strip() == str(
        Shape(8, 0.1, "square", 0)
    )
    assert "[default: 3; 1<=x<=8]" in run("--help").output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--width", "0"), ("--width", "9"), ("--share", "0"), ("--share", "1"), ("--form", "flat"), ("--depth", "-1")],
)
def test_an_option_has_the_bounds_of_its_field(option, value):
    result = run(option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_options_that_another_configuration_takes_are_left_to_it():
    @dataclass
    class Other:
        form: str

    assert taken(Shape, {"size": 1, "form": "round", "colour": "red"}, but=Other) == {"size": 1}


@pytest.mark.parametrize(("command", "config", "least"), [(train, TrainConfig, 12), (train, TextPlan, 8)])
def test_commands_and_configurations_have_the_same_defaults(command, config, least):
    defaults = {field.name: field.default for field in fields(config)}
    options = {option.name for option in command.params} & defaults.keys() - DECIDED
    assert len(options) >= least
    with command.make_context("command", ["--target", "t", "--output", "o"]) as context:
        for name in options:
            expected = defaults[name]
            if not isinstance(expected, int | float | str | tuple | None):
                continue  # made by a factory
            assert context.params[name] == expected, name
