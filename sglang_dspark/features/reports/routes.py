"""``/dspark`` and the routes below it: questions to the schedulers, and documents made of their answers.

Questions go over SGLang's channel for looking at a running server. Each replica has a scheduler, which counts and
decides on its own; one document is made of all answers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec
import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_model, get_serving

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.declared import Scalar, field_types
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.graphs import has_prefill_graphs
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.http import TURNS, Turns, error_response, flat_object, tokenizer_manager, without_root
from sglang_dspark.engine.request_options import Speculation
from sglang_dspark.engine.scheduler import StepDriver
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import ServerArgs, TokenizerManager
from sglang_dspark.engine.support import versions
from sglang_dspark.errors import FAILURES, BusyError, ConfigError
from sglang_dspark.features.reports import counters
from sglang_dspark.features.reports.counters import Sums, SumsLists
from sglang_dspark.gpu_paths import GPU_PATHS, described

if TYPE_CHECKING:
    from sglang.srt.utils.auth import AuthDecision


ANSWER_KEY = "dspark"
"""Where our answer lies among the figures that the channel was made for."""
REPLICA = "replica"
"""Where the number of the scheduler's replica lies next to it, from 0."""
READ_ONLY = ("stats", "capabilities")
Replies = list[dict[str, Any]]
Question = tuple[str, frozenset[tuple[str, Scalar]]]


class Channel:
    """Asks the schedulers one question at a time.

    SGLang's channel gives the next answers that come to the caller whose turn it is. So a question that was sent keeps
    its turn until its answers are there, whether its caller still waits or not.

    Args:
        manager: gives SGLang's ``TokenizerManager``.
        turns: of all calls to the schedulers.
    """

    def __init__(self, manager: Callable[[], TokenizerManager], turns: Turns) -> None:
        self._manager, self._turns = manager, turns
        # Questions that have not been sent yet, so that equal questions get the same answer.
        self._unsent: dict[Question, asyncio.Task[Replies]] = {}

    async def ask(self, question: str, fields: dict[str, Scalar]) -> list[Any]:
        """Return the answers of all schedulers, that of replica 0 first; of the ranks of a replica, rank 0 answers.

        Args:
            question: ``stats``, ``policy`` or ``capabilities``.
            fields: what belongs to it, scalars.

        Raises:
            ConfigError: a scheduler refuses.
            BusyError: it cannot answer, or not in time, or too many calls wait already.
        """
        key = question, frozenset(fields.items())
        task = self._unsent.get(key) if question in READ_ONLY else None
        if task is None:
            task = self._unsent[key] = self._turns.begin(partial(self._ask, key, question, fields))
        replies = await self._turns.result(task)
        for reply in replies:
            if "refusal" in reply:
                raise ConfigError(reply["refusal"])
            if "failed" in reply:
                raise BusyError(f"the scheduler could not answer {reply['failed']}; its log says why")
        return [reply["answer"] for reply in replies]

    async def _ask(self, key: Question, question: str, fields: dict[str, Scalar]) -> Replies:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        if self._unsent.get(key) is asyncio.current_task():
            del self._unsent[key]
        manager = self._manager()
        manager.auto_create_handle_loop()
        # SGLang's requests have no id here, and no client can write one.
        request = GetInternalStateReq(rid=json.dumps([question, fields]))
        states = [output.internal_state for output in await manager.get_internal_state_communicator(request)]
        return [state[ANSWER_KEY] for state in sorted(states, key=itemgetter(REPLICA))]


Json = dict[str, object]
A = TypeVar("A")


class StatsAnswer(TypedDict):
    """The answer of a scheduler that is asked for its statistics."""

    uptime_s: float
    state: Json
    versions: Sequence[counters.Count]
    sums: SumsLists
    counted: dict[str, dict[str, float]]


def with_each(report: Callable[[Sequence[A]], Json], answers: Sequence[A]) -> Json:
    """Return a report of all answers, with that of each under ``replicas`` if there are several."""
    each: Json = {"replicas": [report([answer]) for answer in answers]} if len(answers) > 1 else {}
    return report(answers) | each


def stats_document(answers: Sequence[StatsAnswer]) -> Json:
    """Return the JSON of ``GET /dspark/stats``: counts are added up, and figures made of the sums.

    Of the state of several schedulers it has what is the same in all of them.
    """
    return {
        "uptime_s": max(answer["uptime_s"] for answer in answers),
        **in_common([answer["state"] for answer in answers]),
        "weight_versions": counters.report_versions(answer["versions"] for answer in answers),
        "drafter_fit": counters.fit_of(*(answer["versions"][-1]["first_drafts"] for answer in answers)).report(),
        **Sums.of(answer["sums"] for answer in answers).report(),
        **{name: added(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]},
    }


def in_common(answers: Sequence[Json]) -> Json:
    """Return the entries that are the same in all answers."""
    first, *others = answers
    return {key: value for key, value in first.items() if all(other[key] == value for other in others)}


def added(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of counts by name."""
    total: dict[str, float] = {}
    for one in counts:
        total |= {name: total.get(name, 0) + number for name, number in one.items()}
    return total


PAGE = "/dspark"
Document = Callable[[Sequence[Any]], Json]
"""Makes JSON of the answers of all schedulers."""


def add_routes(app: FastAPI, target_only: str | None) -> None:
    """Add our routes to SGLang's application.

    Args:
        target_only: why the target decodes without drafts, which is all that there is to say then; None if it does not.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_api_route(PAGE, _page, methods=["GET"], include_in_schema=False)
    if target_only is not None:
        alone = {"effective_decode_path": "target-only", "reason": target_only, "versions": versions(), "policies": {}}
        app.add_api_route("/dspark/capabilities", lambda: alone, methods=["GET"], name="capabilities")
        return
    channel = Channel(tokenizer_manager, TURNS)

    async def answered(question: str, make: Document, fields: dict[str, Scalar] | None = None) -> Response:
        try:
            answers = await channel.ask(question, fields or {})
        except ConfigError as error:
            return error_response(400, str(error), question)
        except BusyError as error:
            return error_response(503, str(error), question)
        # Numbers of numpy's become Python's. JSON does not know NaN: such a figure is null.
        return Response(msgspec.json.encode(make(answers), enc_hook=np.generic.item), media_type="application/json")

    async def stats() -> Response:
        return await answered("stats", _stats_with_failures)

    async def capabilities() -> Response:
        return await answered("capabilities", partial(with_each, in_common))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def policy(request: Request) -> Response:
        fields = await flat_object(request, "policy", '{"policy": "auto"}')
        if isinstance(fields, JSONResponse):
            return fields
        return await answered("policy", partial(with_each, in_common), fields)

    app.add_api_route("/dspark/stats", stats, methods=["GET"])
    app.add_api_route("/dspark/capabilities", capabilities, methods=["GET"])
    app.add_api_route("/dspark/policy", policy, methods=["POST"])


def _stats_with_failures(answers: Sequence[StatsAnswer]) -> Json:
    """Return the statistics of the schedulers with what has failed in this process, too."""
    failed = added([*(answer["counted"]["failed_advice"] for answer in answers), FAILURES])
    return with_each(stats_document, answers) | {"failed_advice": failed}


async def _page() -> HTMLResponse:
    page, policy = page_document(needs_key=bool(_server_args().api_key))
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@cache
def page_document(needs_key: bool) -> tuple[str, str]:
    """Return the live page, and the ``Content-Security-Policy`` to serve it with.

    The page needs nothing from anywhere else. The policy lets it talk only to its own server, and run no other script.

    Args:
        needs_key: whether the server answers only with an API key: the page then asks for it first.
    """
    folder = files(__package__) / "page"
    html, style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    filled = html.replace("{{needs_key}}", "yes" if needs_key else "no")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return filled.replace("{{style}}", style).replace("{{script}}", script), policy.format(*digests)


def _server_args() -> ServerArgs:
    return tokenizer_manager().server_args


@hook(
    "sglang.srt.utils.auth.decide_request_auth",
    HookType.AFTER,
    where="routes",
    reason="a browser has to load the page at /dspark before it can ask for the API key",
    by=Moment.SOME_TIME,
)
def page_needs_no_key(decision: object, *, method: str, path: str, **credentials: object) -> AuthDecision | None:
    """Have SGLang let requests for the page through without a key: it holds no data, and asks for the key itself.

    A browser cannot be told to send a header with the address that somebody types.
    """
    from sglang.srt.utils.auth import AuthDecision

    is_page = method == "GET" and path.endswith(PAGE) and without_root(path, _server_args().fastapi_root_path) == PAGE
    return AuthDecision(allowed=True) if is_page else None


def capabilities(driver: StepDriver) -> dict[str, Any]:
    """Return JSON: the decode path and why, versions, checkpoints, policies and features."""
    server_args, model_runner = driver.server_args, driver.target_worker.model_runner
    schedule, decoding = driver.schedule, driver.decoding()
    server = speculating(server_args)
    assert server is not None, "a scheduler that decodes with DSPARK asks"
    options = server.config
    model, on_gpu = model_runner.model_config, model_runner.device == "cuda"
    path = get_model().model_path
    has_head = schedule.forecast.calibration is not None
    return {
        "effective_decode_path": "dspark",
        "engine": server.engine,
        "reason": decoding.reason,
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": str(model_runner.dtype).removeprefix("torch."),
        "target": {
            "path": path,
            # After an update from disk, SGLang serves the target under its new path.
            "name": server_args.served_model_name if path == server_args.model_path else path,
            "architecture": (model.hf_config.architectures or [None])[0],
            "vocab_size": model.hf_text_config.vocab_size,
            "context_length": model.context_len,
            "weight_version": get_serving().weight_version,
            **{key: said for feature in all_features() for key, said in feature.describe_target(model_runner).items()},
        },
        "drafter": decoding.drafter,
        "simulated_acceptance": options.acceptance_profile(decoding.gamma),
        "block_size": decoding.gamma,
        "max_verify": schedule.max_verify,
        "max_running_requests": int(model_runner.max_running_requests),
        "policy": schedule.policy.name,
        "policies": {
            name: {
                "available": (unavailable := schedule.why_not(name)) is None,
                "reason": unavailable,
                "waits_for_device": on_gpu and schedule.waits_for_device(name),
            }
            for name in POLICY_NAMES
        },
        **{key: said for part in driver.parts for key, said in part.describe().items()},
        "gpu_paths": described(_named_paths(server_args, server)) if driver.control.on_gpu else {},
        "self_check": decoding.self_check,
        "adjusted_flags": list(server.adjusted) if isinstance(server, DSparkServer) else [],
        "features": {
            "speculation_fields": _speculation_fields(server),
            "cuda_graphs": decoding.cuda_graphs,
            "overlap": not server_args.disable_overlap_schedule,
            "prefill_attention": model_runner.attn_backend.prefill_attention_backend_str,
            "prefill_cuda_graphs": has_prefill_graphs(model_runner),
            "decode_attention": model_runner.attn_backend.decode_attention_backend_str,
            "same_bits": decoding.same_bits,
            "tensor_parallel_size": server_args.tp_size,
            "data_parallel_size": server_args.dp_size,
            "online_calibration": has_head and options.online_calibration,
            "prometheus": bool(server_args.enable_metrics),
        },
    }


def in_one_line(found: dict[str, Any]) -> str:
    """Return one line for the log with the findings of :func:`capabilities`."""
    available = [name for name, policy in found["policies"].items() if policy["available"]]
    return (
        f"effective decode path {found['effective_decode_path']} ({found['reason']}); policy {found['policy']} of "
        f"{', '.join(available)}; block size {found['block_size']}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    )


def _named_paths(server_args: ServerArgs, server: DSparkServer | OtherServer) -> list[str]:
    """Return the paths of a GPU that the operator has turned on, with our options or SGLang's."""
    config = server.config
    asked: dict[str, bool] = {
        "scheduled": server.engine == "scheduled",
        "mixed-chunks": bool(server_args.enable_mixed_chunk),
        "same-bits": bool(server_args.enable_deterministic_inference),
        "memory-graphs": bool(server_args.enable_memory_saver) and envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get(),
        **{name: bool(getattr(config, path.option)) for name, path in GPU_PATHS.items() if path.option},
    }
    return [*(name for name, given in asked.items() if given), *config.unproven]


def _speculation_fields(server: DSparkServer | OtherServer) -> list[str]:
    found = list(field_types(Speculation))
    if not server.has_confidence_head:
        found.remove("confidence_threshold")
    for feature in all_features():
        if (keys := feature.request_keys) is not None:
            found += [key for key in keys.key_types() if key not in keys.unserved(server)]
    return found
