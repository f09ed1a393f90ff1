"""Options and the configurations that they fill agree."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from dspark_training.command import train
from dspark_training.options import Flag, SectionedCommand, settings_options, taken
from dspark_training.settings import TextPlan, TrainConfig
from msgspec import Meta

from sglang_dspark.declared import int_range

# What the command decides from other options, or from the target, where the user does not say.
DECIDED = {"invent", "compute_dtype", "mask_token_id"}


@dataclass
class Shape:
    size: Annotated[int, int_range(1, 8), Flag("How wide.", "width")] = 3
    share: Annotated[float, Meta(gt=0, lt=1), Flag("How much.")] = 0.5
    form: Annotated[Literal["round", "square"], Flag("Which.")] = "round"
    depth: Annotated[int, int_range(0), Flag("How deep.")] | None = None
    sides: Annotated[tuple[Annotated[int, int_range(1)], ...], Flag("How long.")] = (1, 2)
    filled: Annotated[bool, Flag("Whether there is something in it.")] = True
    hidden: int = 1


@click.command(cls=SectionedCommand)
@click.option("--other", is_flag=True, help="Of no configuration.")
@settings_options(Shape, "Shape")
def shape(other, **options):
    click.echo(Shape(**taken(Shape, options)))


def run(*arguments):
    return CliRunner().invoke(shape, arguments)


def test_an_option_has_the_default_of_its_field():
    assert run().output.strip() == str(Shape())
    options = ("--width", "8", "--share", "0.1", "--form", "square", "--depth", "0", "--sides", "4,5", "--no-filled")
    assert run(*options).output.strip() == str(Shape(8, 0.1, "square", 0, (4, 5), filled=False))


def test_the_help_has_a_heading_for_every_configuration():
    help_text = run("--help").output
    own, of_shape = help_text.split("\nShape:\n")
    assert "--other" in own
    assert "--width" in of_shape and "[default: 3; 1<=x<=8]" in of_shape
    assert "hidden" not in help_text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--width", "0"),
        ("--width", "9"),
        ("--share", "0"),
        ("--share", "1"),
        ("--form", "flat"),
        ("--depth", "-1"),
        ("--sides", "1,0"),
        ("--sides", "1,x"),
    ],
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
