"""Weights that change while the server runs: the target's and the drafter's, through SGLang's routes and its engine.

A scheduler writes weights, and follows what SGLang writes. The process that serves HTTP has a route for a new drafter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_model
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_dspark.draft.stored import check_replacement, has_tensors
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.http import TURNS, error_response, flat_object, tokenizer_manager
from sglang_dspark.engine.part import Part, part_of
from sglang_dspark.engine.scheduler import StepDriver, answer_with, driver_of
from sglang_dspark.errors import BusyError, ConfigError, DSparkError

logger = logging.getLogger(__name__)

PREFIX = "draft."
"""Of the names of a drafter's tensors among those of its target."""

Named = Iterable[tuple[str, torch.Tensor]]

DRAFTER_FORMAT = "draft"
"""The value of ``load_format`` that has ``/update_weights_from_disk`` load a drafter."""


class Weights(Part):
    """Has new weights written where they belong.

    Args:
        driver: of the steps.

    Attributes:
        transient: whether tensors lie in memory that the next ones are sent in.
        new_drafter: whether weights of the drafter were written that the decoder has yet to follow.
    """

    def __init__(self, driver: StepDriver) -> None:
        self._driver, self.transient, self.new_drafter = driver, False, False
        self._drafted: list[tuple[str, torch.Tensor]] = []
        self._written, self._failure = 0, ""

    def ready(self) -> None:
        """Have all routes to the target hand on what is the drafter's."""
        model = self._driver.target_worker.model_runner.model
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

    def follow(self) -> None:
        """Have the decoder follow all that was written since it last did; all ranks call it."""
        new, self.new_drafter = self.new_drafter, False
        self._driver.weights_changed(new_drafter=new)

    @property
    def drafter(self) -> Any:
        """Return the drafter whose weights can be written.

        Raises:
            ConfigError: there is none.
        """
        drafter = self._driver.drafter
        if drafter is None or not drafter.num_drawn:
            raise ConfigError(
                "this server has no drafter whose weights could be replaced: it was started without one, or SGLang's "
                "own worker decodes. Send only weights of the target, or restart the server with a drafter"
            )
        return drafter

    @cached_property
    def runners(self) -> Sequence[tuple[str, Any]]:
        """Return what SGLang writes and checks a drafter's tensors with, as if it were a runner of its own."""
        model, network = self.drafter.model, torch.nn.Module()
        network.load_weights = self._keep  # type: ignore[assignment]
        updater = replace(self._driver.target_worker.model_runner.weight_updater, get_model=lambda: network)
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


_WRITES = (
    io_struct.BeginWeightUpdateReqInput,
    io_struct.UpdateWeightFromDiskReqInput,
    io_struct.UpdateWeightsFromTensorReqInput,
    io_struct.UpdateWeightsFromDistributedReqInput,
    io_struct.UpdateWeightsFromIPCReqInput,
    io_struct.EndWeightUpdateReqInput,
)
"""Requests that write weights."""
_MEETING = ("BeginWeightUpdate", "UpdateWeightsFromTensor", "UpdateWeightsFromIPC", "EndWeightUpdate")
"""Requests at whose end all ranks wait for each other."""
_AWAY = ConfigError(
    'the memory of the weights is released: take it back first, POST /resume_memory_occupation {"tags": ["weights"]}'
)


def weights_of(driver: StepDriver) -> Weights:
    """Return the part of SGLang's scheduler that writes weights."""
    weights = part_of(driver.parts, Weights)
    assert weights is not None, "weights of every server can be written"
    return weights


def answer_writes(scheduler: Any) -> None:
    """Have requests that write weights come to :func:`write_weights`.

    What the drafter reads of the target follows, and what was learned is forgotten. Weights that do not fit are
    refused, where SGLang would end the server.
    """
    for kind in _WRITES:
        answer_with(scheduler, kind, write_weights, scheduler.weight_updater)


def write_weights(original: Callable[[Any], Any], manager: Any, request: Any) -> Any:
    """Have SGLang write weights between two steps, or a drafter's checkpoint, and follow them.

    Of weights that come in parts, the last one is followed. If some do not fit, the request is at fault and not the
    server: it says so and serves what it has. The drafter's are written once all ranks have those of the target, and
    on all ranks or on none. Into memory that is released nothing is written: a GPU would fault.
    """
    name = type(request).__name__
    if GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags:
        return _failed(name, _AWAY)
    driver = driver_of(manager.scheduler)
    weights = weights_of(driver)
    weights.transient = name.startswith("UpdateWeightsFromIPC")
    from_disk = isinstance(request, UpdateWeightFromDiskReqInput)
    loads_drafter = from_disk and request.load_format == DRAFTER_FORMAT
    torch.get_device_module(manager.tp_worker.device).synchronize()  # a step that was launched reads the old ones
    try:
        if from_disk and not loads_drafter:
            _check_target(driver, Path(request.model_path))
        answer = _replace_drafter(driver, manager, request) if loads_drafter else original(request)
    except Exception as error:  # noqa: BLE001 - SGLang's loaders raise whatever they meet
        answer = _failed(name, error)
        if name.startswith(_MEETING):
            torch.distributed.barrier(group=manager.tp_cpu_group)
    answer, drafted = _agreed(answer, manager.tp_cpu_group), weights.drafted()
    if drafted and answer.success:
        try:
            weights.drafter.follow_target()  # whose tensors it may read
            weights.drafter.write(drafted)
            weights.new_drafter = True
        except Exception as error:  # noqa: BLE001 - whatever comes of writing into memory
            answer = _failed(name, error)
        answer = _agreed(answer, manager.tp_cpu_group)
    if manager._session is None:
        weights.follow()
    if not answer.success or name.startswith("Update"):
        weights.note(None if answer.success else answer.message)
    return answer


@hook(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._select_runners",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang's drafters have the names of their target's tensors, so it writes those into both",
    by=Moment.SOME_TIME,
)
def select_runners(original: Callable[..., Any], manager: Any, selector: str = "all") -> Any:
    """Return the runners of the target, whatever else is asked for, or of the drafter if only it is named.

    What is for both is told apart from its names.
    """
    if selector != "draft":
        return original(manager, "target" if selector == "all" else selector)
    driver = driver_of(manager.scheduler)
    return weights_of(driver).runners if driver.drafter is not None else original(manager, selector)


def _check_target(driver: StepDriver, path: Path) -> None:
    """Check that a target's checkpoint has the tensors of the served one, as far as their files say."""
    if has_tensors(path):
        model = driver.target_worker.model_runner.model_config
        configs = model.hf_config, model.hf_text_config  # of a model with pictures, either may say it
        tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        check_replacement(path, Path(get_model().model_path), tied=tied)


def _replace_drafter(driver: StepDriver, manager: Any, request: Any) -> Any:
    """Put another checkpoint in the place of the drafter's weights, on all ranks or on none."""
    weights = weights_of(driver)
    answer = UpdateWeightFromDiskReqOutput(success=True, message="The drafter was replaced.")
    try:
        put = weights.drafter.load_new(request.model_path)
    except Exception as error:  # noqa: BLE001 - a damaged file, or a device whose memory is full
        _log_failure(error)
        answer = UpdateWeightFromDiskReqOutput(success=False, message=f"{error}; the previous drafter stays in use")
    answer = _agreed(answer, manager.tp_cpu_group)
    if not answer.success:
        return answer
    put()
    weights.new_drafter = True
    manager.record_weight_version_after_update(request.weight_version)
    if request.flush_cache and not manager.flush_cache(empty_cache=request.torch_empty_cache):
        answer.message += (
            " Requests are running, so K/V of the old drafter stays in the cache and makes drafts worse: call "
            "/flush_cache when the server is idle."
        )
    return answer


def _failed(request: str, error: Exception) -> Any:
    """Return what SGLang answers to a request of this class that failed."""
    _log_failure(error)
    message = str(error)
    if not isinstance(error, DSparkError):
        message = (
            f"new weights could not be written ({type(error).__name__}: {error}). Some weights may be new and others "
            "old: send all weights again, in the shapes of this model"
        )
    return getattr(io_struct, request.replace("ReqInput", "ReqOutput"))(success=False, message=message)


def _log_failure(error: Exception) -> None:
    """Write an error into the log: with its traceback, if it is not one of ours, which says all."""
    logger.error("DSPARK: new weights were refused: %s", error, exc_info=not isinstance(error, DSparkError))


def _agreed(answer: Any, ranks: Any) -> Any:
    """Return the answer of the first rank that failed; SGLang would answer only for rank 0."""
    if torch.distributed.get_world_size(group=ranks) == 1:
        return answer
    answers: list[Any] = [None] * torch.distributed.get_world_size(group=ranks)
    torch.distributed.all_gather_object(answers, answer, group=ranks)
    return next((one for one in answers if not one.success), answer)


DRAFTER_ROUTE = "/dspark/drafter"
_EXAMPLE = '{"path": "/models/drafter"}'
_one_load = asyncio.Lock()


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
    HookType.AROUND,
    where="front_end",
    reason="the answer to a second update would end the process that waits for the first",
    by=Moment.SOME_TIME,
)
async def one_at_a_time(original: Callable[..., Awaitable[Any]], manager: Any, request: Any) -> Any:
    """Have checkpoints that are to be loaded wait for each other."""
    async with _one_load:
        return await original(manager, request)


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._update_model_path_info",
    HookType.AROUND,
    where="front_end",
    reason="a new drafter is loaded as a new target is, and the target's name stays",
    by=Moment.SOME_TIME,
)
def keep_path(original: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Note the path of a new target, and leave that of a drafter to the scheduler."""
    if load_format != DRAFTER_FORMAT:
        original(manager, model_path, load_format)


def add_route(app: Any, target_only: str | None) -> None:
    """Add the route to SGLang's application, if there is a drafter to replace."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if target_only is None:
        app.add_api_route(DRAFTER_ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(replace_drafter), methods=["POST"])


async def replace_drafter(request: Request) -> Response:
    """Load another drafter between two steps, while requests run: ``{"path": "/models/drafter"}``."""
    fields = await flat_object(request, "path", _EXAMPLE)
    if isinstance(fields, JSONResponse):
        return fields
    path = fields.get("path")
    if not isinstance(path, str) or len(fields) > 1:
        return error_response(400, f"the body must be like {_EXAMPLE}, not {fields}", "path")
    manager: Any = tokenizer_manager()
    manager.auto_create_handle_loop()
    asked = UpdateWeightFromDiskReqInput(model_path=path, load_format=DRAFTER_FORMAT)
    try:
        load = TURNS.begin(partial(manager._wait_for_model_update_from_disk, asked))
        success, message, _paused = await TURNS.result(load)
    except BusyError as error:
        return error_response(503, str(error), "path")
    return JSONResponse({"success": True, "message": message}) if success else error_response(400, message, "path")


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    part=Weights,
    of_any_worker=True,
    routes=add_route,
    answers=answer_writes,
)
