"""Every knob of DSPARK in one place: name, flag, environment twin, default and check.

Nothing else in the package reads ``os.environ``. A value comes from the command line, else from the environment twin
(``--speculative-dspark-verify-len`` -> ``SGLANG_DSPARK_VERIFY_LEN``), else from the default here.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_dspark.errors import ConfigError

FLAG_PREFIX = "--speculative-dspark-"
ENV_PREFIX = "SGLANG_DSPARK_"

SCHEDULES = ("auto", "early-stop", "static", "threshold", "off")
SERVED_SCHEDULES = ("static",)


def _non_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _schedule(text: str) -> str:
    if text not in SCHEDULES:
        raise ValueError(f"must be one of {', '.join(SCHEDULES)}")
    if text not in SERVED_SCHEDULES:
        raise ValueError(f"is not served by this release; use {' or '.join(SERVED_SCHEDULES)}")
    return text


def _knob(parse: Callable[[str], Any], help_text: str, *, default: Any = None) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help_text})


@dataclass(frozen=True)
class DSparkConfig:
    """Resolved options of one server. ``None`` means "take it from the draft checkpoint"."""

    schedule: str = _knob(
        _schedule,
        "Verify policy. `static` verifies the same number of drafts for every request in every step.",
        default="static",
    )
    block_size: int | None = _knob(
        _positive_int, "Drafts per request and step (gamma); at most the block size of the draft checkpoint."
    )
    verify_len: int | None = _knob(
        _non_negative_int, "Policy `static`: drafts verified per request and step, 0 to the block size."
    )

    @classmethod
    def resolve(cls, cli: Mapping[str, str | None], env: Mapping[str, str] | None = None) -> DSparkConfig:
        """Build the configuration from flag texts and the environment.

        Args:
            cli: flag texts by field name; ``None`` or a missing key means the flag was not given.
            env: the environment; ``os.environ`` unless given.

        Raises:
            ConfigError: a value does not parse or is out of range, or an unknown ``SGLANG_DSPARK_*`` variable is set.
        """
        env = os.environ if env is None else env
        by_env = {ENV_PREFIX + f.name.upper(): f for f in fields(cls)}
        unknown = sorted(k for k in env if k.startswith(ENV_PREFIX) and k not in by_env)
        if unknown:
            raise ConfigError(
                f"unknown environment variable {unknown[0]}={env[unknown[0]]!r}; known are {', '.join(sorted(by_env))}"
            )
        values = {}
        for env_name, knob in by_env.items():
            origin, text = flag_name(knob.name), cli.get(knob.name)
            if text is None:
                origin, text = env_name, env.get(env_name)
            if text is not None:
                try:
                    values[knob.name] = knob.metadata["parse"](text)
                except ValueError as error:
                    raise ConfigError(f"{origin}={text!r}: {error}") from error
        return cls(**values)

    def gamma(self, checkpoint_block_size: int) -> int:
        """Drafts per request and step for a checkpoint trained with ``checkpoint_block_size``.

        Raises:
            ConfigError: ``block_size`` exceeds the checkpoint's.
        """
        if self.block_size is None:
            return checkpoint_block_size
        if self.block_size > checkpoint_block_size:
            raise ConfigError(
                f"{flag_name('block_size')}={self.block_size} exceeds the block size {checkpoint_block_size} that the "
                f"draft checkpoint was trained with; pass {checkpoint_block_size} or less"
            )
        return self.block_size

    def static_verify_len(self, gamma: int) -> int:
        """Drafts verified per request and step under the policy ``static``.

        Raises:
            ConfigError: ``verify_len`` exceeds ``gamma``.
        """
        if self.verify_len is None:
            return gamma
        if self.verify_len > gamma:
            raise ConfigError(
                f"{flag_name('verify_len')}={self.verify_len} exceeds the {gamma} drafts of a block; "
                f"pass a value from 0 to {gamma}"
            )
        return self.verify_len


def flag_name(field_name: str) -> str:
    """``verify_len`` -> ``--speculative-dspark-verify-len``."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def _dest(field_name: str) -> str:
    return "speculative_dspark_" + field_name


def add_flags(parser: ArgumentParser) -> None:
    """Add one flag per knob. Texts are parsed by :meth:`DSparkConfig.resolve`, so errors name the flag or variable."""
    group = parser.add_argument_group("DSPARK (sglang-dspark plugin)")
    for knob in fields(DSparkConfig):
        shown = "from the draft checkpoint" if knob.default is None else knob.default
        group.add_argument(
            flag_name(knob.name),
            dest=_dest(knob.name),
            default=None,
            help=f"{knob.metadata['help']} Default: {shown}. Environment: {ENV_PREFIX}{knob.name.upper()}.",
        )


def flag_texts(namespace: Any) -> dict[str, str | None]:
    """Texts of our flags in a parsed namespace, by field name."""
    return {knob.name: getattr(namespace, _dest(knob.name), None) for knob in fields(DSparkConfig)}
