"""Every option of a server in one place: name, flag, environment twin, default and check.

No other module reads variables of the server's options. A value comes from the command line, else from the environment
twin (``--speculative-dspark-verify-len`` -> ``SGLANG_DSPARK_VERIFY_LEN``), else from the default here.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from sglang_dspark.declared import describe, field_types, int_range, validate
from sglang_dspark.errors import ConfigError
from sglang_dspark.gpu_paths import UnprovenPath

FLAG_PREFIX = "--speculative-dspark-"
ENV_PREFIX = "SGLANG_DSPARK_"

# Kubernetes sets these variables in every pod of a namespace that has a Service with the name `sglang-dspark`.
_OF_A_SERVICE = re.compile(
    ENV_PREFIX + r"(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)

# Drafts that presets may propose per request and step on a server without a drafter, unless --speculative-dspark-
# block-size says otherwise: as many as the released drafters propose.
DRAFT_FREE_BLOCK_SIZE = 7
MOST_TAIL = 16  # every slot costs graphs, buffers and K/V slots their width

PolicyName = Literal["auto", "early-stop", "static", "threshold", "off"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)
Probability = Annotated[float, Meta(ge=0, le=1, description="must lie in [0, 1]")]
Profile = Annotated[tuple[Probability, ...], Meta(description="must all lie in [0, 1]")]
Paths = Annotated[tuple[UnprovenPath, ...], Meta(description=f"must be some of {', '.join(get_args(UnprovenPath))}")]
Switch = Annotated[bool, Meta(description="must be on or off")]


def _on_or_off(text: str) -> bool | str:
    # SGLang writes `on` and `off` of a YAML file as `true` and `false`.
    return {"on": True, "true": True, "off": False, "false": False}.get(text, text)


def _option(
    help_text: str,
    *,
    default: Any = None,
    read: Callable[[str], object] = str,
    nargs: Literal["+"] | None = None,
    switch: bool = False,
) -> Any:
    """Declare one option.

    Args:
        read: turns its text into a value.
        nargs: of its flag, for ``argparse``, if that does not take exactly one value.
        switch: it is off by default, and on if its flag has no value.
    """
    flag = {"nargs": "?", "const": "on"} if switch else {"nargs": nargs, "const": None}
    default, read = (False, _on_or_off) if switch else (default, read)
    return field(default=default, metadata={"help": help_text, "read": read, "flag": flag})


@dataclass(frozen=True)
class DSparkConfig:
    """Hold the resolved options of one server; :func:`default_text` says what None means."""

    schedule: PolicyName = _option(
        "Policy that decides how many drafts are verified. `auto` decides by measured step times and the drafter's "
        "confidence, and does not speculate while that would be slower. `early-stop` is Algorithm 1 of the DSpark "
        "paper. `static` verifies the same number of drafts in every step. `threshold` verifies the drafts before "
        "the first one of low confidence. `off` drafts nothing.",
        default="auto",
        read=lambda text: "off" if text == "false" else text,
    )
    block_size: Annotated[int, int_range(1)] | None = _option(
        "Drafts per request and step (gamma). With a confidence head, this may be up to 16 more than the drafter's "
        "own block; the further drafts are copied from the text.",
        read=int,
    )
    verify_len: Annotated[int, int_range(0)] | None = _option(
        "With the policy `static`: number of drafts verified per request and step, from 0 to the block size.", read=int
    )
    confidence_threshold: Probability | None = _option(
        "With the policy `threshold`: verify the drafts before the first one whose raw confidence is below this value.",
        read=float,
    )
    confidence_sts_path: str | None = _option(
        "File of temperatures that calibrate the confidence head, written by `sglang-dspark calibrate`."
    )
    online_calibration: Switch = _option(
        "`on` or `off`: whether the server keeps calibrating the confidence head with what verification accepts.",
        default=True,
        read=_on_or_off,
    )
    sps_table_path: str | None = _option(
        "File of step times, for `auto`, `early-stop` and `--speculative-dspark-max-gap-ms`. If the file of step times "
        "exists, it is used; otherwise the start measures and writes it. Without the flag, step times are kept below "
        "~/.cache/sglang-dspark.",
    )
    draft_vocabulary: str | None = _option(
        "File that lists the tokens that the drafter may propose, written by `sglang-dspark vocabulary`. This list "
        "replaces the drafter's own `draft_vocabulary.json`.",
    )
    draft_quantization: Literal["int8"] | None = _option(
        "`int8`: a GPU also keeps a copy of the drafter's layers and heads in 8 bits, and uses it in steps of few rows "
        "(not run on a GPU yet). On a CPU, `int8` only rounds the weights, which saves no time.",
    )
    draft_free: Switch = _option(
        "Serve without a drafter: requests with a preset or a prediction speculate, others decode one token per step. "
        "`--speculative-dspark-draft-free` without a value means `on`.",
        switch=True,
    )
    answer_cache: Annotated[int, int_range(1)] | None = _option(
        "Megabytes of host memory for finished answers, from which later requests with the same key copy drafts.",
        read=int,
    )
    tpot_ms: Annotated[float, Meta(ge=0.1, le=10_000, description="must lie in [0.1, 10000]")] | None = _option(
        "SLO of requests that name none, in milliseconds per token after the first token.",
        read=float,
    )
    min_tpot_ms: Annotated[float, Meta(ge=0.1, description="must be a number from 0.1, or inf")] = _option(
        "Smallest SLO that a request may name, in milliseconds per token; a request that names a smaller one gets "
        "HTTP 400. With `inf`, a request that names any SLO gets HTTP 400.",
        default=0.1,
        read=float,
    )
    max_gap_ms: Annotated[float, Meta(ge=1, le=60_000, description="must lie in 1 to 60000")] | None = _option(
        "With `--enable-mixed-chunk`: how many milliseconds running requests may wait for a chunk of a prompt. "
        "Prompt chunks that would take longer than this bound are cut.",
        read=float,
    )
    prompt_rows: Annotated[int, int_range(0)] | None = _option(
        "Largest number of prompt tokens that a step verifies together with drafts, in place of a prefill (not run on "
        "a GPU yet). With the value 0, all prompts get a prefill.",
        read=int,
    )
    unproven: Paths = _option(
        "On a GPU, turn on code paths that are off by default, because their speed has not been measured on a GPU "
        f"yet. Pass one or more of {', '.join(get_args(UnprovenPath))}. `gpu_paths` in `GET /dspark/capabilities` says "
        "which paths are on.",
        default=(),
        read=lambda text: text.split(","),
        nargs="+",
    )
    self_check: Switch = _option(
        "On a GPU, compare kernels with plain PyTorch, and CUDA graphs with eager steps, during the start. The first "
        "start takes about 5 seconds longer. A fault ends the start. The check is off by default because it has not "
        "run on a GPU yet. `--speculative-dspark-self-check` without a value means `on`.",
        switch=True,
    )
    answer_cache_key: Literal["request", "prompt"] = _option(
        "Key for the answers to requests that name no `cache` key. With `prompt`, the prompt is the key, so "
        "that answers to one prompt copy from each other. With `request`, answers to requests without a "
        "`cache` key are not kept.",
        default="request",
    )
    engine: Literal["auto", "plugin", "scheduled", "builtin"] = _option(
        "Worker that decodes for `--speculative-algorithm DSPARK`. `plugin` is the plugin's worker. `builtin` is "
        "SGLang's own worker, unmodified, without the plugin's other flags. `auto` takes the plugin's worker if "
        "it serves target and device, else SGLang's own worker. `scheduled` is SGLang's own worker, on a GPU, with "
        "the plugin's policies.",
        default="auto",
    )
    untested_sglang: Switch = _option(
        "Serve on a release of SGLang on which the plugin's tests have not passed. "
        "`--speculative-dspark-untested-sglang` without a value means `on`.",
        switch=True,
    )
    fallback: Literal["refuse", "target-only"] = _option(
        "What to do if the drafter is unusable, or target or device is not served. `refuse` ends the start. "
        "`target-only` serves the target without speculation, and says why in the log and in `GET "
        "/dspark/capabilities`.",
        default="refuse",
    )
    simulate_acceptance: Profile | None = _option(
        "Only with `--load-format dummy`: accept drafts at random, the same ones for the same prompt and position. "
        "The value has the acceptance rate of each position if all drafts before it are accepted, such as "
        "`0.8,0.75,0.7`; the last rate counts for the rest of the block. With the engine `builtin`, only the "
        "environment variable has an effect, not the flag.",
        read=lambda text: [float(part) for part in text.split(",")],
        nargs="+",
    )

    def __post_init__(self) -> None:
        for name, schedule in (("verify_len", "static"), ("confidence_threshold", "threshold")):
            value = getattr(self, name)
            if value is not None and self.schedule != schedule:
                raise ConfigError(
                    f"{flag_name(name)}={value} belongs to the policy {schedule}, but the policy is {self.schedule}; "
                    f"pass {flag_name('schedule')} {schedule} or drop the flag"
                )
        of_drafters = {
            "schedule": None if self.schedule in ("auto", "off") else self.schedule,
            "confidence_sts_path": self.confidence_sts_path,
            "simulate_acceptance": self.simulate_acceptance,
            "answer_cache": self.answer_cache,
            "draft_vocabulary": self.draft_vocabulary,
            "draft_quantization": self.draft_quantization,
        }
        for name, value in of_drafters.items():
            if self.draft_free and value is not None:
                raise ConfigError(
                    f"{flag_name(name)}={value} needs a drafter, and {flag_name('draft_free')} serves without one; "
                    "drop one of the flags"
                )
        if self.answer_cache_key != "request" and self.answer_cache is None:
            raise ConfigError(
                f"{flag_name('answer_cache_key')}={self.answer_cache_key} needs {flag_name('answer_cache')}, e.g. 64"
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
            ConfigError: a value does not parse or is out of range, or an unknown ``SGLANG_DSPARK_*`` variable is set
                that is not one of a Kubernetes Service.
        """
        env = os.environ if env is None else env
        by_env = {ENV_PREFIX + f.name.upper(): f for f in fields(cls)}
        ours = {name for name in env if name.startswith(ENV_PREFIX) and not _OF_A_SERVICE.fullmatch(name)}
        unknown = sorted(ours.difference(by_env, foreign))
        if unknown:
            raise ConfigError(
                f"unknown environment variable {unknown[0]}={env[unknown[0]]!r}; known are {', '.join(sorted(by_env))}"
            )
        values = {}
        for env_name, option in by_env.items():
            text = option_text(option.name, cli, env)
            origin = env_name if cli.get(option.name) is None else flag_name(option.name)
            if text is not None:
                try:
                    values[option.name] = validate(option.metadata["read"](text), _TYPES[option.name])
                except ValueError as error:
                    raise ConfigError(f"{origin}={text!r}: {describe(_TYPES[option.name])}") from error
        return cls(**values)

    def with_policy(self, fields: Mapping[str, Any]) -> DSparkConfig:
        """Return these options with another policy.

        Args:
            fields: decoded JSON: ``policy``, and ``verify_len`` or ``confidence_threshold`` if the policy takes one.

        Raises:
            ConfigError: names the field, its value and the remedy.
        """
        known = {"policy": "schedule", "verify_len": "verify_len", "confidence_threshold": "confidence_threshold"}
        for name in fields:
            if name not in known:
                raise ConfigError(f"{name} is not a field of a policy; known are {', '.join(known)}")
        if "policy" not in fields:
            raise ConfigError(f"policy is missing; give one of {', '.join(POLICY_NAMES)}")
        values: dict[str, Any] = dict.fromkeys(known.values())
        for name, value in fields.items():
            try:
                values[known[name]] = validate(value, _TYPES[known[name]])
            except ValueError as error:
                raise ConfigError(f"{name}={value!r}: {error}") from error
        return replace(self, **values)

    def gamma(self, checkpoint_gamma: int | None, tail: int = MOST_TAIL) -> int:
        """Return the drafts per request and step.

        Args:
            checkpoint_gamma: drafts of a block of the checkpoint; None without a drafter.
            tail: slots that a block may have after those, for candidates from the text.

        Raises:
            ConfigError: ``block_size`` exceeds both together.
        """
        if self.block_size is None:
            return DRAFT_FREE_BLOCK_SIZE if checkpoint_gamma is None else checkpoint_gamma
        if checkpoint_gamma is not None and self.block_size > checkpoint_gamma + tail:
            copied = f" and {tail} copied ones" if tail else ", and a drafter without a confidence head has no others"
            raise ConfigError(
                f"{flag_name('block_size')}={self.block_size} exceeds the {checkpoint_gamma} drafts of a block of the "
                f"draft checkpoint{copied}; pass {checkpoint_gamma + tail} or less"
            )
        return self.block_size

    def acceptance_profile(self, gamma: int) -> tuple[float, ...] | None:
        """Return simulated acceptance probabilities of the ``gamma`` positions of a block; None for real acceptance.

        Raises:
            ConfigError: there are more than ``gamma``.
        """
        profile = self.simulate_acceptance
        if profile is None:
            return None
        if len(profile) > gamma:
            raise ConfigError(
                f"{flag_name('simulate_acceptance')} has {len(profile)} probabilities, and a block has {gamma} "
                f"drafts; give {gamma} or fewer"
            )
        return (*profile, *[profile[-1]] * (gamma - len(profile)))

    def max_verify(self, gamma: int) -> int:
        """Return the most drafts that a step verifies per request; under ``static``, every step verifies so many.

        Raises:
            ConfigError: ``verify_len`` exceeds ``gamma``.
        """
        if self.schedule == "off":
            return 0
        if self.verify_len is not None and self.verify_len > gamma:
            raise ConfigError(
                f"{flag_name('verify_len')}={self.verify_len} exceeds the {gamma} drafts of a block; "
                f"pass a value from 0 to {gamma}"
            )
        return gamma if self.verify_len is None else self.verify_len


_TYPES = field_types(DSparkConfig)


def flag_name(field_name: str) -> str:
    """Return the flag of a field: ``verify_len`` -> ``--speculative-dspark-verify-len``."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def flag_dest(field_name: str) -> str:
    """Return where ``argparse`` keeps the flag's text: ``verify_len`` -> ``speculative_dspark_verify_len``."""
    return "speculative_dspark_" + field_name


def option_text(field_name: str, cli: Mapping[str, str | None], env: Mapping[str, str] | None = None) -> str | None:
    """Return the text given for a option, by its flag or else by its variable; None if neither was given."""
    text = cli.get(field_name)
    return (os.environ if env is None else env).get(ENV_PREFIX + field_name.upper()) if text is None else text


_DEFAULTS_IN_WORDS = {
    "block_size": "the drafter's",
    "verify_len": "the block size",
    "sps_table_path": "in the cache",
    "prompt_rows": "0",
    "unproven": "none",
}


def default_text(field_name: str) -> str:
    """Return the default of an option as ``--help`` and docs/options.md show it."""
    default = str(getattr(DSparkConfig, field_name))
    return _DEFAULTS_IN_WORDS.get(field_name) or {"None": "none", "True": "on", "False": "off"}.get(default, default)


def add_flags(parser: ArgumentParser, but: Collection[str] = ()) -> None:
    """Add one flag per option. Texts are parsed by :meth:`DSparkConfig.resolve`, so errors name the flag or variable.

    Args:
        but: names of options whose flags ``parser`` already has.
    """
    group = parser.add_argument_group("DSPARK (sglang-dspark plugin)")
    for option in fields(DSparkConfig):
        if option.name in but:
            continue
        env_name = ENV_PREFIX + option.name.upper()
        group.add_argument(
            flag_name(option.name),
            dest=flag_dest(option.name),
            default=None,
            **option.metadata["flag"],
            help=f"{option.metadata['help']} Default: {default_text(option.name)}. Environment: {env_name}.",
        )


def flag_texts(namespace: Any) -> dict[str, str | None]:
    """Return the texts of our flags in a parsed namespace, by field name."""
    values = {option.name: getattr(namespace, flag_dest(option.name), None) for option in fields(DSparkConfig)}
    # Flags that SGLang has as well may come parsed, and a list of a YAML file as several values.
    texts = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return {name: None if text is None else str(text) for name, text in texts.items()}
