"""The servers of a sweep, as named on the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.launch import dspark_flags

PLAIN, BUILTIN, OFF = "plain", "builtin", "off"
POLICIES = (PLAIN, BUILTIN, *POLICY_NAMES)
DTYPES = ("float32", "bfloat16", "float16")
SIMULATED = "SGLANG_DSPARK_SIMULATE_ACCEPTANCE"
"""Variable with which our worker and SGLang's own keep drafts at random, and both the same ones."""
GRAMMAR = "[NAME=]POLICY[:ARGUMENT][@DTYPE] [VARIABLE=VALUE ...] [SERVER FLAGS]"

_HEAD = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<policy>[a-z-]+)(?::(?P<argument>[^@\s]+))?(?:@(?P<dtype>\w+))?")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=.*")


@dataclass(frozen=True)
class Configuration:
    """One line of a sweep's figures.

    Attributes:
        label: what tables and figures call it; unique within a sweep.
        policy: ``plain`` (without DSPARK), ``builtin`` (SGLang's own worker), or a policy of DSPARK.
        argument: the verify length of ``static``, the confidence threshold of ``threshold``; else empty.
        dtype: ``--dtype`` of the server.
        extra_flags: further arguments of the server.
        variables: of its environment, each as ``NAME=value``.
    """

    label: str
    policy: str
    argument: str
    dtype: str
    extra_flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def is_dspark(self) -> bool:
        """Return whether this is a server of ours that runs DSPARK."""
        return self.policy in POLICY_NAMES

    @property
    def verify_len(self) -> int | None:
        """Return the drafts verified per request and step when the configuration fixes that number."""
        return int(self.argument) if self.policy == "static" and self.argument else None

    @property
    def simulated_steps(self) -> str | None:
        """Return the rates that a server's steps follow from, if it simulates acceptance of whole blocks; else None.

        A policy that verifies as many drafts as there are rates verifies whole blocks.
        """
        rates = self.environment.get(SIMULATED)
        whole = self.policy in (BUILTIN, "static")
        return rates if rates and whole and self.verify_len in (None, len(rates.split(","))) else None

    @property
    def policy_fields(self) -> dict[str, str | int | float] | None:
        """Return the body of ``POST /dspark/policy`` for a running server; None without DSPARK."""
        if not self.is_dspark:
            return None
        if not self.argument:
            return {"policy": self.policy}
        if self.policy == "static":
            return {"policy": self.policy, "verify_len": int(self.argument)}
        return {"policy": self.policy, "confidence_threshold": float(self.argument)}

    def server_flags(self, draft: str | None) -> tuple[str, ...]:
        """Return the arguments of ``sglang.launch_server``; the server is told its policy while it runs.

        Args:
            draft: folder of the draft checkpoint.

        Raises:
            ConfigError: the configuration speculates and there is no drafter.
        """
        flags = ["--dtype", self.dtype]
        if self.is_dspark or self.policy == BUILTIN:
            if draft is None:
                raise ConfigError(f"--config {self.label} speculates; pass --draft with a checkpoint for the target")
            flags += dspark_flags(draft)
        return (*flags, *self.extra_flags)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that the server is told also."""
        given = dict(variable.split("=", 1) for variable in self.variables)
        own = {"SGLANG_DSPARK_ENGINE": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "static"}
        return (own if self.policy == BUILTIN else {}) | given


def parse_configuration(text: str, default_dtype: str) -> Configuration:
    """Read one ``--config``, e.g. ``static:3@float32 --speculative-dspark-block-size 5``.

    Args:
        text: :data:`GRAMMAR`.
        default_dtype: used when the text names none.

    Raises:
        ConfigError: the text does not follow the grammar, or a part of it is not known.
    """
    words = shlex.split(text)
    match = _HEAD.fullmatch(words[0]) if words else None
    if match is None:
        raise ConfigError(f"--config {text!r} is not of the form {GRAMMAR}, e.g. plain or static:3@float32")
    policy, argument = match["policy"], match["argument"] or ""
    dtype = match["dtype"] or default_dtype
    if policy not in POLICIES:
        raise ConfigError(f"--config {text!r}: unknown policy {policy!r}; use one of {', '.join(POLICIES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"--config {text!r}: unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    _check_argument(text, policy, argument)
    variables = tuple(takewhile(_VARIABLE.fullmatch, words[1:]))
    extra_flags = tuple(words[1 + len(variables) :])
    body = f"{policy}:{argument}" if argument else policy
    label = match["name"] or " ".join((f"{body}@{dtype}", *words[1:]))
    return Configuration(label, policy, argument, dtype, extra_flags, variables)


def parse_configurations(texts: Sequence[str], default_dtype: str) -> list[Configuration]:
    """Read every ``--config`` of a command line.

    Raises:
        ConfigError: one of them is malformed, two share a label, or there is none.
    """
    configurations = [parse_configuration(text, default_dtype) for text in texts]
    if not configurations:
        raise ConfigError("nothing to measure; pass --config, e.g. plain or auto")
    labels = [configuration.label for configuration in configurations]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"--config {label} is given twice; give one of them a name, e.g. `again=plain`")
    return configurations


def choose_baselines(served: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Return the label of the configuration that the speed of each one is divided by, by label.

    A DSPARK policy is divided by ``off`` of the same dtype, which runs on the same server: that ratio is speculation's.
    ``off`` and all others are divided by the first plain one of the same dtype, else by the first of that dtype: for
    ``off``, that ratio is what the plugin's own steps gain without any draft. A ratio of a policy to plain serving
    would mix the two; it is all that is left where the sweep has no ``off``. A baseline maps to itself.

    Args:
        served: label, policy and dtype of every configuration.
    """
    by_dtype: dict[str, str] = {}
    for label, _, dtype in sorted(served, key=lambda entry: entry[1] != PLAIN):
        by_dtype.setdefault(dtype, label)
    without_drafts = {dtype: label for label, policy, dtype in reversed(served) if policy == OFF}
    speculates = {label: policy in POLICY_NAMES and policy != OFF for label, policy, _ in served}
    return {
        label: without_drafts.get(dtype, by_dtype[dtype]) if speculates[label] else by_dtype[dtype]
        for label, _, dtype in served
    }


def _check_argument(text: str, policy: str, argument: str) -> None:
    if policy == "static":
        if argument and not argument.isdecimal():
            raise ConfigError(f"--config {text!r}: the verify length {argument!r} is not a number of drafts, 0 or more")
    elif policy == "threshold":
        if not re.fullmatch(r"0?\.\d+|[01](\.0*)?", argument):
            raise ConfigError(f"--config {text!r}: pass a threshold from 0 to 1, e.g. threshold:0.5")
    elif argument:
        raise ConfigError(f"--config {text!r}: policy {policy} takes no argument; drop {argument!r}")
