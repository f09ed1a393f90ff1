"""Every knob of DSPARK in one place: name, flag, environment twin, default and check.

Nothing else in the package reads ``os.environ``. A value comes from the command line, else from the environment twin
(``--speculative-dspark-verify-len`` -> ``SGLANG_DSPARK_VERIFY_LEN``), else from the default here.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sglang_dspark.errors import ConfigError

FLAG_PREFIX = "--speculative-dspark-"
ENV_PREFIX = "SGLANG_DSPARK_"

# Drafts that presets may propose per request and step on a server without a drafter, unless --speculative-dspark-
# block-size says otherwise: as many as the released drafters propose.
DRAFT_FREE_BLOCK_SIZE = 7

SCHEDULES = ("auto", "early-stop", "static", "threshold", "adaptive-block", "off")
FALLBACKS = ("refuse", "target-only")
ENGINES = ("builtin", "plugin")
# Verifies lengths without rhyme or reason, for tests of exactness: accepted, but not offered.
RANDOM_SCHEDULE = "random"


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
    if text not in (*SCHEDULES, RANDOM_SCHEDULE):
        raise ValueError(f"must be one of {', '.join(SCHEDULES)}")
    return text


def _fallback(text: str) -> str:
    if text not in FALLBACKS:
        raise ValueError(f"must be one of {', '.join(FALLBACKS)}")
    return text


def _engine(text: str) -> str:
    if text not in ENGINES:
        raise ValueError(f"must be {' or '.join(ENGINES)}")
    return text


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must lie in [0, 1]")
    return value


def _profile(text: str) -> tuple[float, ...]:
    return tuple(_probability(part) for part in text.split(","))


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("must be on or off")
    return text == "on"


def _knob(parse: Callable[[str], Any], help_text: str, *, default: Any = None, bare: str | None = None) -> Any:
    """``bare`` is what the flag means without a value; None where it takes one."""
    return field(default=default, metadata={"parse": parse, "help": help_text, "bare": bare})


@dataclass(frozen=True)
class DSparkConfig:
    """Resolved options of one server. ``None`` means "take it from the draft checkpoint"."""

    schedule: str = _knob(
        _schedule,
        "Verify policy. `auto` follows measured step times and the drafter's confidence, and does not speculate where "
        "that would be slower; `early-stop` is Algorithm 1 of the DSpark paper; `static` verifies the same number of "
        "drafts in every step; `threshold` verifies up to the first draft of low confidence; `adaptive-block` verifies "
        "whole blocks, or short ones while few drafts are accepted; `off` drafts nothing.",
        default="auto",
    )
    block_size: int | None = _knob(
        _positive_int, "Drafts per request and step (gamma); at most the block size of the draft checkpoint."
    )
    verify_len: int | None = _knob(
        _non_negative_int, "Policy `static`: drafts verified per request and step, 0 to the block size."
    )
    confidence_threshold: float | None = _knob(
        _probability, "Policy `threshold`: verify the drafts before the first one whose raw confidence is below this."
    )
    confidence_sts_path: str | None = _knob(
        str, "Calibration temperatures of the confidence head, written by `python -m sglang_dspark calibrate`."
    )
    online_calibration: bool = _knob(
        _switch, "`on` or `off`: keep the confidence head calibrated by what verification observes.", default=True
    )
    sps_table_path: str | None = _knob(
        str,
        "Table of measured step times: loaded when the file exists, else measured at start-up and written there, under "
        "the policies `auto` and `early-stop`. Without the flag it is kept below ~/.cache/sglang-dspark.",
    )
    draft_free: bool = _knob(
        _switch,
        "Serve without a drafter: requests with a preset speculate, others decode plainly. Needs no value.",
        default=False,
        bare="on",
    )
    engine: str | None = _knob(
        _engine,
        "Who answers to `--speculative-algorithm DSPARK` where SGLang has a DSPARK of its own: `builtin`, or `plugin`, "
        "which is this one.",
    )
    untested_sglang: bool = _knob(
        _switch,
        "Serve on a release of SGLang that the plugin's tests have not passed on. Needs no value.",
        default=False,
        bare="on",
    )
    fallback: str = _knob(
        _fallback,
        "When the drafter is unusable, or target or device are not served: `refuse` ends the start, `target-only` "
        "serves the target alone and says why in the log and in `GET /dspark/capabilities`.",
        default="refuse",
    )
    simulate_acceptance: tuple[float, ...] | None = _knob(
        _profile,
        "With `--load-format dummy` only: keep drafts by chance, to measure the steps of a shape. Probabilities by "
        "position, of keeping a draft when all before it are kept, e.g. `0.8,0.75,0.7`; the last one counts for the "
        "rest of the block.",
    )

    def __post_init__(self) -> None:
        for name, schedule in (("verify_len", "static"), ("confidence_threshold", "threshold")):
            value = getattr(self, name)
            if value is not None and self.schedule != schedule:
                raise ConfigError(
                    f"{flag_name(name)}={value} belongs to the policy {schedule}, but the policy is {self.schedule}; "
                    f"pass {flag_name('schedule')} {schedule} or drop the flag"
                )
        if self.draft_free and self.schedule not in ("auto", "off"):
            raise ConfigError(
                f"{flag_name('schedule')}={self.schedule} chooses among the drafts of a drafter, and "
                f"{flag_name('draft_free')} serves without one; pass auto or off, or serve a drafter"
            )
        if self.draft_free and self.confidence_sts_path is not None:
            raise ConfigError(
                f"{flag_name('confidence_sts_path')}={self.confidence_sts_path} calibrates a drafter, and "
                f"{flag_name('draft_free')} serves without one; drop one of the flags"
            )
        if self.draft_free and self.simulate_acceptance is not None:
            raise ConfigError(
                f"{flag_name('simulate_acceptance')} stands in for a drafter's quality, and {flag_name('draft_free')} "
                "serves without one; drop one of the flags"
            )
        if self.schedule == "threshold" and self.confidence_threshold is None:
            raise ConfigError(f"{flag_name('schedule')}=threshold needs {flag_name('confidence_threshold')}, e.g. 0.5")

    @classmethod
    def resolve(
        cls, cli: Mapping[str, str | None], env: Mapping[str, str] | None = None, foreign: Collection[str] = ()
    ) -> DSparkConfig:
        """Build the configuration from flag texts and the environment.

        Args:
            cli: flag texts by field name; ``None`` or a missing key means the flag was not given.
            env: the environment; ``os.environ`` unless given.
            foreign: variables with our prefix that others read.

        Raises:
            ConfigError: a value does not parse or is out of range, or an unknown ``SGLANG_DSPARK_*`` variable is set.
        """
        env = os.environ if env is None else env
        by_env = {ENV_PREFIX + f.name.upper(): f for f in fields(cls)}
        unknown = sorted(k for k in env if k.startswith(ENV_PREFIX) and k not in by_env and k not in foreign)
        if unknown:
            raise ConfigError(
                f"unknown environment variable {unknown[0]}={env[unknown[0]]!r}; known are {', '.join(sorted(by_env))}"
            )
        values = {}
        for env_name, knob in by_env.items():
            text = knob_text(knob.name, cli, env)
            origin = env_name if cli.get(knob.name) is None else flag_name(knob.name)
            if text is not None:
                try:
                    values[knob.name] = knob.metadata["parse"](text)
                except ValueError as error:
                    raise ConfigError(f"{origin}={text!r}: {error}") from error
        return cls(**values)

    def with_policy(self, fields: Mapping[str, Any]) -> DSparkConfig:
        """These options with another policy.

        Args:
            fields: decoded JSON: ``policy``, and ``verify_len`` or ``confidence_threshold`` where it takes one.

        Raises:
            ConfigError: names the field, its value and the remedy.
        """
        known = {"policy": "schedule", "verify_len": "verify_len", "confidence_threshold": "confidence_threshold"}
        for name in fields:
            if name not in known:
                raise ConfigError(f"{name} is not a field of a policy; known are {', '.join(known)}")
        if "policy" not in fields:
            raise ConfigError(f"policy is missing; give one of {', '.join(SCHEDULES)}")
        values: dict[str, Any] = dict.fromkeys(known.values())
        for name, value in fields.items():
            kind = str if name == "policy" else int | float
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r} has the wrong type")
            try:
                values[known[name]] = _PARSERS[known[name]](str(value))
            except ValueError as error:
                raise ConfigError(f"{name}={value!r}: {error}") from error
        return replace(self, **values)

    def gamma(self, checkpoint_block_size: int | None) -> int:
        """Drafts per request and step for a checkpoint trained with ``checkpoint_block_size``.

        Args:
            checkpoint_block_size: None without a drafter.

        Raises:
            ConfigError: ``block_size`` exceeds the checkpoint's.
        """
        if self.block_size is None:
            return DRAFT_FREE_BLOCK_SIZE if checkpoint_block_size is None else checkpoint_block_size
        if checkpoint_block_size is not None and self.block_size > checkpoint_block_size:
            raise ConfigError(
                f"{flag_name('block_size')}={self.block_size} exceeds the block size {checkpoint_block_size} that the "
                f"draft checkpoint was trained with; pass {checkpoint_block_size} or less"
            )
        return self.block_size

    def acceptance_profile(self, gamma: int) -> tuple[float, ...] | None:
        """Simulated probabilities of acceptance for the ``gamma`` positions of a block; None for real acceptance.

        Raises:
            ConfigError: there are more of them.
        """
        profile = self.simulate_acceptance
        if profile is None:
            return None
        if len(profile) > gamma:
            raise ConfigError(
                f"{flag_name('simulate_acceptance')} has {len(profile)} probabilities where a block has {gamma} "
                f"drafts; give {gamma} or fewer"
            )
        return (*profile, *[profile[-1]] * (gamma - len(profile)))

    def max_verify(self, gamma: int) -> int:
        """Most drafts that a step verifies per request.

        Raises:
            ConfigError: ``verify_len`` exceeds ``gamma``.
        """
        match self.schedule:
            case "static":
                return self.static_verify_len(gamma)
            case "off":
                return 0
        return gamma

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


_PARSERS: Mapping[str, Callable[[str], Any]] = {knob.name: knob.metadata["parse"] for knob in fields(DSparkConfig)}


def flag_name(field_name: str) -> str:
    """``verify_len`` -> ``--speculative-dspark-verify-len``."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def flag_dest(field_name: str) -> str:
    """Where ``argparse`` puts the flag's text: ``verify_len`` -> ``speculative_dspark_verify_len``."""
    return "speculative_dspark_" + field_name


def knob_text(field_name: str, cli: Mapping[str, str | None], env: Mapping[str, str] | None = None) -> str | None:
    """What was asked for a knob, by flag or else by variable; None where nothing was."""
    text = cli.get(field_name)
    return (os.environ if env is None else env).get(ENV_PREFIX + field_name.upper()) if text is None else text


_DEFAULTS_IN_WORDS = {
    "block_size": "the drafter's",
    "verify_len": "the block size",
    "online_calibration": "on",
    "draft_free": "off",
    "sps_table_path": "in the cache",
    "engine": "builtin",
    "untested_sglang": "off",
}


def default_text(field_name: str) -> str:
    """The default of a knob as help and README show it."""
    default = getattr(DSparkConfig, field_name)
    return _DEFAULTS_IN_WORDS.get(field_name, "none" if default is None else str(default))


def add_flags(parser: ArgumentParser, but: Collection[str] = ()) -> None:
    """Add one flag per knob. Texts are parsed by :meth:`DSparkConfig.resolve`, so errors name the flag or variable.

    Args:
        but: names of knobs whose flags ``parser`` has already.
    """
    group = parser.add_argument_group("DSPARK (sglang-dspark plugin)")
    for knob in fields(DSparkConfig):
        if knob.name in but:
            continue
        env_name = ENV_PREFIX + knob.name.upper()
        bare = knob.metadata["bare"]
        group.add_argument(
            flag_name(knob.name),
            dest=flag_dest(knob.name),
            default=None,
            **({} if bare is None else {"nargs": "?", "const": bare}),
            help=f"{knob.metadata['help']} Default: {default_text(knob.name)}. Environment: {env_name}.",
        )


def flag_texts(namespace: Any) -> dict[str, str | None]:
    """Texts of our flags in a parsed namespace, by field name."""
    values = {knob.name: getattr(namespace, flag_dest(knob.name), None) for knob in fields(DSparkConfig)}
    # Flags that SGLang has as well may come parsed.
    return {name: None if value is None else str(value) for name, value in values.items()}
