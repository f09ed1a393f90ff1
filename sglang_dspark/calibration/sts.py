"""Sequential Temperature Scaling (paper 3.2.1) and the file that holds its result.

The file is a JSON object::

    {
      "version": 1,
      "temperatures": [1.23, 1.10, ...],     gamma numbers: c_k = sigmoid(z_k / T_k)
      "target": "Qwen3-8B",                  the pair that it was measured on; may be left out
      "draft": "dspark_qwen3_8b_block7",
      "dataset": "alpaca.jsonl",             the rest is for the reader: prompts, rounds that were fitted,
      "num_samples": 12345,                  and ECE by position before and after, on rounds that were not
      "ece_before": [0.057, ...],
      "ece_after": [0.020, ...]
    }

All keys but ``version``, ``target`` and ``draft`` are also those of the DSPARK built into later
versions of SGLang.
"""

import math
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np
from msgspec import Meta

from sglang_dspark.calibration.metrics import ece
from sglang_dspark.calibration.survival import Bools, Floats, Ints, sigmoid, survived
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write
from sglang_dspark.hub import checkpoint_name

Temperature = Annotated[float, Meta(ge=0.05, le=20.0)]
"""What a file may hold; beyond, a head is a constant or a step, and its file a mistake."""

GRID_LIMIT = 4.0
GRID_STEPS = 100
TIE = 1e-12
"""ECEs closer than this are equal: sums in another order differ by as much."""


def fit_sts(logits: Floats, accepted: Ints) -> Floats:
    """Fit one temperature per position, in order, with the earlier ones frozen.

    ``T_k = argmin_T ECE(prod_{i<k} sigmoid(z_i / T_i) * sigmoid(z_k / T), prefix accepted through k)`` over 201
    log-spaced temperatures from 1/4 to 4. Of equal ones the nearest to 1 wins, then the larger. The paper leaves grid,
    bins and ties open; bins are the evaluator's 20.

    Args:
        logits: [n, gamma] raw logits of rounds whose whole block was verified.
        accepted: [n] drafts accepted in each.

    Returns:
        [gamma] float64

    Raises:
        ConfigError: no rounds, or logits that are not finite.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if not len(logits):
        raise ConfigError("logits=[]: no round to fit temperatures to; collect rounds whose whole block was verified")
    if not np.isfinite(logits).all():
        raise ConfigError("logits hold NaN or infinite values; check the drafter with python -m sglang_dspark doctor")
    outcomes = survived(accepted, logits.shape[1])
    grid = _grid()
    survival = np.ones(len(logits))
    temperatures = np.ones(logits.shape[1])
    for k in range(logits.shape[1]):
        best = _best(survival, logits[:, k], outcomes[:, k], grid)
        temperatures[k] = grid[best]
        survival = survival * sigmoid(logits[:, k] / grid[best])
    return temperatures


def _best(survival: Floats, logits: Floats, outcomes: Bools, grid: Floats) -> int:
    errors = np.array([ece(survival * sigmoid(logits / temperature), outcomes) for temperature in grid])
    return int(np.argmax(errors <= errors.min() + TIE))


def _grid() -> Floats:
    """Return temperatures by distance from 1, of equally distant ones the larger first."""
    steps = np.arange(1, GRID_STEPS + 1) * (math.log(GRID_LIMIT) / GRID_STEPS)
    return np.exp(np.concatenate([[0.0], np.stack([steps, -steps], axis=1).ravel()]))


class StsCalibration(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="version", tag=1
):
    """Temperatures with their origin; the fields are the keys of the file, see the module."""

    temperatures: tuple[Temperature, ...]
    target: str | None = None
    draft: str | None = None
    dataset: str = ""
    num_samples: Annotated[int, Meta(ge=0)] = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    ece_shifted: tuple[float, ...] = ()  # of files of earlier versions

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            with atomic_write(path) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours"
            ) from error

    @classmethod
    def load(cls, path: Path, gamma: int, *, target: str | None = None, draft: str | None = None) -> Self:
        """Read a file for a server with blocks of ``gamma`` drafts.

        Args:
            target: the model that is served, name or path; checked against the file where both are given. Only the
                last part of a path counts: the same model lies elsewhere on another machine.
            draft: its drafter, likewise.

        Raises:
            ConfigError: the file is missing, malformed, or made for another block size or pair.
        """
        try:
            document = msgspec.json.decode(path.read_bytes())
            calibration = msgspec.convert(document, cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: {error}; make one with python -m sglang_dspark calibrate") from error
        if "version" not in document:
            raise ConfigError(
                f"{path} has no version, as files for SGLang's own worker; calibrate for this one with python -m "
                "sglang_dspark calibrate"
            )
        if (count := len(calibration.temperatures)) != gamma:
            raise ConfigError(
                f"{path}: {count} temperatures for blocks of {gamma} drafts; calibrate with this drafter and block size"
            )
        for key, measured, served in (("target", calibration.target, target), ("draft", calibration.draft, draft)):
            if measured and served and checkpoint_name(measured).lower() != checkpoint_name(served).lower():
                raise ConfigError(
                    f"{path}: {key}={measured!r:.80}: but {served!r} is served; calibrate this pair, or remove the key "
                    "if they are the same weights"
                )
        return calibration
