"""Weights of a scheduler: which were written, and how tensors find the target or the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_dspark.engine.part import Part
from sglang_dspark.engine.scheduler import Decoder
from sglang_dspark.errors import ConfigError

PREFIX = "draft."
"""Of the names of a drafter's tensors among those of its target."""

Named = Iterable[tuple[str, torch.Tensor]]

DRAFTER = "draft"
"""The value of ``load_format`` that has ``/update_weights_from_disk`` load a drafter."""


class Weights(Part):
    """Has new weights written where they belong.

    Args:
        decoder: of the scheduler.

    Attributes:
        transient: whether tensors lie in memory that the next ones are sent in.
        new_drafter: whether weights of the drafter were written that the decoder has yet to follow.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.transient, self.new_drafter = decoder, False, False
        self._drafted: list[tuple[str, torch.Tensor]] = []
        self._written, self._failure = 0, ""

    def ready(self) -> None:
        """Have all routes to the target hand on what is the drafter's."""
        model = self._decoder.target_worker.model_runner.model
        model.load_weights = partial(self._load, model.load_weights)

    def _load(self, load_target: Callable[[Named], Any], named: Named) -> Any:
        """Load tensors into the target, and keep those with our prefix for the drafter."""

        def of_target() -> Named:
            for name, tensor in named:
                if name.startswith(PREFIX):
                    self._keep([(name, tensor)])
                else:
                    yield name, tensor

        return load_target(of_target())

    def _keep(self, named: Named) -> None:
        for name, tensor in named:
            self._drafted.append((name.removeprefix(PREFIX), tensor.clone() if self.transient else tensor))

    def drafted(self) -> list[tuple[str, torch.Tensor]]:
        """Return the drafter's tensors among those that came since the last call, by the names of its checkpoint."""
        drafted, self._drafted = self._drafted, []
        return drafted

    def write_drafter(self, named: Named) -> None:
        """Write tensors of the drafter, beside those of the target that it reads; all ranks call it.

        Raises:
            DSparkError: there is no drafter, or one does not fit; nothing was written.
        """
        self.drafter.follow_target()
        self.drafter.write(named)
        self.new_drafter = True

    def load_drafter(self, path: str) -> Callable[[], None]:
        """Load a checkpoint beside the drafter, and return what puts it in its place; all ranks call both.

        Raises:
            DSparkError: there is no drafter, or the checkpoint does not fit.
        """
        put = self.drafter.load_beside(path)

        def replace() -> None:
            put()
            self.new_drafter = True

        return replace

    def follow(self) -> None:
        """Have the decoder follow all that was written since it last did; all ranks call it."""
        new, self.new_drafter = self.new_drafter, False
        self._decoder.weights_changed(new_drafter=new)

    @property
    def drafter(self) -> Any:
        """Return the drafter whose weights can be written.

        Raises:
            ConfigError: there is none.
        """
        drafter = self._decoder.drafter
        if drafter is None or not drafter.num_drawn:
            raise ConfigError(
                "this server has no drafter whose weights could be replaced: it was started without one, or SGLang's "
                "own worker decodes. Send weights of the target alone, or restart it with a drafter"
            )
        return drafter

    @cached_property
    def runners(self) -> Sequence[tuple[str, Any]]:
        """Return what SGLang writes and checks a drafter's tensors with, as if it were a runner of its own."""
        model, network = self.drafter.model, _Network(self._keep)
        updater = replace(self._decoder.target_worker.model_runner.weight_updater, get_model=lambda: network)
        checker = WeightChecker(get_model=lambda: model)
        return [("draft", SimpleNamespace(weight_updater=updater, check_weights=checker.handle))]

    def note(self, failure: str | None) -> None:
        """Count an update; one that failed may have been written in part."""
        if failure is None:
            self._written, self._failure = self._written + 1, ""
        else:
            self._failure = failure

    def report(self) -> dict[str, Any]:
        return {"weights": {"updates": self._written, "failure": self._failure or None}}


class _Network(torch.nn.Module):
    """Looks to SGLang's loaders like a network whose tensors they may write."""

    def __init__(self, load: Callable[[Named], None]) -> None:
        super().__init__()
        self.load_weights = load
