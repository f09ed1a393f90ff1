"""Few combinations of many values: faults that take three of them to show are rare, and interpreted kernels slow."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, so many that every two values of different axes meet."""
    combinations = [tuple(enumerate(indices)) for indices in itertools.product(*(range(len(axis)) for axis in axes))]
    missing = {pair for combination in combinations for pair in itertools.combinations(combination, 2)}
    chosen = []
    while missing:
        best = max(
            combinations, key=lambda combination: len(missing.intersection(itertools.combinations(combination, 2)))
        )
        missing.difference_update(itertools.combinations(best, 2))
        chosen.append(tuple(axes[axis][index] for axis, index in best))
    return chosen
