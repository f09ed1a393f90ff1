"""What a sweep itself says of its server's times, where nobody has measured a table of step times on its machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.blocks import BlockSource, ConditionalAcceptance, RecordedBlocks
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.measured_sweep import Measured


def table_of(points: Sequence[Measured]) -> SpsTable:
    """The step times of ``off`` and of the fixed lengths, by the requests that ran on average.

    Between two numbers of requests and between two lengths they are linear. What the shortest length takes beyond a
    plain step is drafting, and a shorter one takes as long: with CUDA graphs, as here, blocks are drafted whole. Every
    size is a tier.

    Raises:
        ConfigError: the sweep has not both.
    """
    lengths = sorted({point.fixed_len for point in points if point.fixed_len is not None})
    if len(lengths) < 2 or lengths[0] != 0:
        raise ConfigError("--check without --table takes step times from the sweep, which needs `off` and a static:N")
    users = sorted({point.users for point in points})
    step_ms = np.zeros((len(users), len(lengths)))
    for column, length in enumerate(lengths):
        seen = sorted((point.running, _mean_step_ms(point)) for point in points if point.fixed_len == length)
        step_ms[:, column] = _at(users, *zip(*seen, strict=True))
    drafts = range(lengths[-1] + 1)
    verify_ms = np.stack([np.interp(drafts, [0, 1, *lengths[1:]], [*row[:2], *row[1:]]) for row in step_ms])[..., None]
    context = round(np.mean([point.prompt_tokens + point.output_tokens / 2 for point in points]))
    key = {"device": "the sweep"}
    tiers = range(1, users[-1] * (lengths[-1] + 1) + 1)
    return SpsTable(key, users, list(drafts), [context], np.zeros_like(verify_ms), verify_ms, tiers)


def _mean_step_ms(point: Measured) -> float:
    """Mean time of a step where nothing comes between two: alone, and where requests begin and end together.

    Elsewhere it is the median, because prefills are no part of it.
    """
    if point.fixed_len and point.users > 1:
        return point.step_ms
    return point.tpot_ms * (1.0 if point.policy == "plain" else point.accept_length)


def _at(places: Sequence[int], known: Sequence[float], values: Sequence[float]) -> list[float]:
    """``values`` between the ``known`` places, and past the last of them as from the last but one to it."""
    inside = np.interp(places, known, values)
    if len(known) < 2:
        return list(inside)
    slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
    return [value + slope * max(0.0, place - known[-1]) for place, value in zip(places, inside, strict=True)]


def costs_of(points: Sequence[Measured], table: SpsTable, noise: float) -> tuple[Costs, float]:
    """The costs of the sweep's server with the step times ``table``, and milliseconds from a user to its queue.

    * A prefill of one prompt: a long gap (the 99th percentile) in the streams of the longest fixed length, less its
      step, where it is shortest. Requests end apart there, so that prompts come one at a time.
    * Further prompts of a batch: the times to first token of the plain server with its fewest and its most users, who
      all begin and end together. The first of them is prefilled alone, and all others after it.
    * The way to the queue: what is left of the time to first token at the fewest users.
    * Decisions: the median, over the loads, of what a step of the policies that decide takes longer than one of the
      longest fixed length.

    Raises:
        ConfigError: the sweep lacks what one of these needs.
    """
    plain = sorted((point for point in points if point.policy == "plain"), key=lambda point: point.users)
    longest = {point.users: point for point in points if point.fixed_len == table.gamma}
    gaps = [point.gap_p99_ms - point.step_ms for point in longest.values() if point.users > 1]
    if not plain or plain[-1].users <= 2 or not gaps:
        raise ConfigError(
            "--check without --table takes prefills from plain and static:N at several loads of the sweep"
        )
    few, many = plain[0], plain[-1]
    one_ms = max(0.0, min(gaps))
    second_ms = (many.ttft_ms - few.ttft_ms) * many.users / (many.users - 1)
    prompt_ms = min(max(0.0, (second_ms - one_ms) / (many.users - 2)), one_ms)
    deciding = [p.step_ms - longest[p.users].step_ms for p in points if p.decides and p.users in longest]
    costs = Costs(
        table,
        Prefill(one_ms - prompt_ms, prompt_ms / few.prompt_tokens),
        noise=noise,
        plain_ms=[(point.users, _mean_step_ms(point)) for point in plain],
        decision_ms=max(0.0, median(deciding)) if deciding else 0.0,
    )
    return costs, max(0.0, few.ttft_ms - one_ms - _mean_step_ms(few))


def blocks_of(points: Sequence[Measured], gamma: int, recorded: RecordedBlocks | None) -> Mapping[int, BlockSource]:
    """By users: blocks that accept as many drafts as the sweep's of the longest fixed length.

    Args:
        recorded: what differs between texts and between drafts; None draws all drafts with one acceptance.

    Raises:
        ConfigError: a load has no such length.
    """
    levels = {point.users: point.accepted_per_round for point in points if point.fixed_len == gamma}
    if missing := sorted({point.users for point in points} - levels.keys()):
        raise ConfigError(
            f"the sweep has no static:{gamma} at {missing} users, which --check takes accept lengths from"
        )
    return {users: recorded.accepting(level) if recorded else _even(level, gamma) for users, level in levels.items()}


def _even(level: float, gamma: int) -> ConditionalAcceptance:
    """One acceptance for all positions, of which so many drafts are accepted."""
    rates = np.linspace(0, 1, 1001)
    expected = (rates ** np.arange(1, gamma + 1)[:, None]).sum(0)
    rate = float(np.interp(level, expected, rates))
    return ConditionalAcceptance((rate,) * gamma, name="accept length of the sweep")
