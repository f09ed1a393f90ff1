"""Tests of the ``speculation`` field from the body of an HTTP request to what the scheduler reads.

What would end the scheduler or be answered otherwise is HTTP 400. Tokenizer workers and replicas take turns.
"""

import asyncio
import json
import os
import signal
import time
from array import array
from threading import Thread
from types import SimpleNamespace

import pytest
from golden_server import settled, settled_params
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_objects import model_config, partly, server_args
from uvicorn.supervisors import Multiprocess

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.http import APP_OF_WORKERS, ROUTES, SpeculationMiddleware, mount
from sglang_dspark.engine.measure_steps import turn
from sglang_dspark.engine.request_options import BatchOptions, Speculation, request_options
from sglang_dspark.engine.requests import ASKED, check_request, known_keys, seed_each
from sglang_dspark.engine.server import DSparkServer, TargetOnly, attach
from sglang_dspark.step.state import RequestLimits


@pytest.mark.parametrize("field", ['{"max_verify": 2, "trace": true}', {"max_verify": 2, "trace": True}])
def test_text_of_a_body_and_an_object_of_a_program_are_the_same(field):
    req = settled_params({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params["mine"] == 1
    assert isinstance(req.sampling_params.custom_params["dspark"], str)
    assert request_options(req) == Speculation(max_verify=2, trace=True)


@pytest.mark.parametrize("field", [None, {}, "null", "{}", '{"trace": false}', {"enabled": True}])
def test_values_that_ask_for_nothing_leave_no_trace(field):
    req = settled_params({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params == {"mine": 1}
    assert request_options(req) == Speculation()


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": 1}, {"dspark": {"max_verify": 7}}])
def test_the_field_of_a_body_wins_over_what_the_body_carries_itself(custom_params):
    before = ASKED.set('{"max_verify": 2}')
    try:
        req = settled_params(custom_params)
    finally:
        ASKED.reset(before)
    assert request_options(req) == Speculation(max_verify=2)
    assert ("mine" in req.sampling_params.custom_params) == ("mine" in (custom_params or {}))


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": {"max_verify": 2}}])
def test_requests_without_the_field_are_left_alone(custom_params):
    req = settled_params(custom_params)
    assert req.sampling_params.custom_params is custom_params
    assert request_options(req) == Speculation()


def test_requests_that_share_their_custom_params_are_each_checked():
    """Prompts of a batch do: what is checked once must not be read as a client's own."""
    shared = {"dspark": '{"max_verify": 2, "trace": false}'}
    first, second = (settled_params(shared) for _ in range(2))
    assert request_options(first) == request_options(second) == Speculation(max_verify=2)
    assert shared["dspark"].endswith('"trace": false}')


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("x", "speculation must be an object, not 'x'"),
        ([], r"speculation must be an object, not \[\]"),
        ({"enabled": 1}, "speculation.enabled must be true or false, not 1"),
        ('{"max_verify": -1}', "speculation.max_verify must be an integer from 0 to 65535, not -1"),
        ({"max_verify": True}, "speculation.max_verify must be an integer"),
        ({"max_verify": 2**70}, "speculation.max_verify must be an integer"),
        ({"confidence_threshold": 1.5}, "speculation.confidence_threshold must be a number from 0 to 1, not 1.5"),
        ({"confidence_threshold": float("nan")}, "speculation.confidence_threshold must be a number from 0 to 1"),
        ({"confidence_threshold": 0.5}, "speculation.confidence_threshold needs a drafter with a confidence head"),
        ('{"labels": [[7, 8]]}', "speculation.labels is not a known option"),
        (
            {"tracing": True},
            "speculation.tracing is not a known option; known are .*enabled, .*trace",
        ),
        ({"\ud800": 1}, r"speculation.\\ud800 is not a known option"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "speculation is nested too deeply"),
    ],
)
def test_bad_values_are_refused_by_name(field, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        settled(field)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["none", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*known_keys()]) | st.text(max_size=6), anything, max_size=4) | anything)
def test_whatever_comes_is_taken_or_refused_by_name(value):
    try:
        settled(value)
    except ValueError as error:
        message = str(error)
        assert message.startswith("speculation")
        assert not isinstance(value, dict) or any(
            f"speculation.{repr(key)[1:-1]}" in message for key in [*value, "candidates"]
        )


def test_options_of_a_request_are_read_once():
    req = settled({"max_verify": 2})
    assert request_options(req) is request_options(req)


def test_a_batch_has_limits_only_if_a_request_asks_for_less():
    usual, traced, short = map(settled, (None, {"trace": True}, {"max_verify": 2}))
    assert BatchOptions.of([usual, usual], 7).limits is None
    assert BatchOptions.of([traced, short], 7) == BatchOptions(RequestLimits((7, 2)), traced=True, ids=["r", "r"])
    assert BatchOptions.of([usual, short], 2).limits is None


def test_limits_of_a_request():
    def limit(**field):
        return request_options(settled(field)).verify_limit(7)

    assert [limit(), limit(max_verify=3), limit(max_verify=9)] == [7, 3, 7]
    assert [limit(enabled=False, max_verify=3), limit(max_verify=0)] == [0, 0]


def test_requests_for_which_nothing_is_drafted_verify_nothing():
    one, other = settled(None), settled({"trace": True})
    assert BatchOptions.of([one, other], 7, lambda req: req is other).limits == RequestLimits((0, 7))


def send(body, path="/generate", chunk=1000, **scope):
    """Return the field that a task of the application behind the middleware finds, or a refusal's status and message.

    The body reaches the application as it was sent.
    """
    seen, sent = [], []

    async def note(receive):
        message = await receive()
        seen.extend([ASKED.get(), message["body"]])

    async def application(scope, receive, send):
        await asyncio.create_task(note(receive))

    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    messages = [{"type": "http.request", "body": c, "more_body": i + 1 < len(chunks)} for i, c in enumerate(chunks)]

    async def receive():
        return messages.pop(0)

    async def respond(message):
        sent.append(message)

    async def serve():
        scoped = {"type": "http", "method": "POST", "path": path, "headers": [], **scope}
        await SpeculationMiddleware(application)(scoped, receive, respond)
        assert ASKED.get() is None  # of the next request

    asyncio.run(serve())
    if sent:
        return sent[0]["status"], json.loads(sent[1]["body"])["message"]
    [field, passed] = seen
    assert passed == body
    return field


@pytest.mark.parametrize("body", [b"", b"{}", b'{"text": "a"}', b'{"text": "speculation"}', b"not json, speculation"])
def test_bodies_without_the_field(body):
    assert send(body, chunk=7) is None


BODY = '{"text": "a", "speculation": {"max_verify": -1}}'
FIELD = '{"max_verify": -1}'


@pytest.mark.parametrize(
    "body",
    [
        BODY.replace("spec", "\\u0073pec"),
        BODY.replace("spec", "spe\\u0063"),
        BODY.replace("speculation", "".join(f"\\u{ord(letter):04X}" for letter in "speculation")),
        BODY.encode("utf-16"),
        BODY.encode("utf-16-le"),
        BODY.encode("utf-32-be"),
        b"\xef\xbb\xbf" + BODY.encode(),
        BODY.replace('"text"', '"speculation": {"trace": true}, "text"'),
    ],
    ids=["first", "middle", "all", "utf-16", "utf-16-le", "utf-32-be", "utf-8-sig", "twice"],
)
def test_the_field_is_found_however_it_is_written(body):
    """Python's JSON, which is SGLang's parser, takes the last of several."""
    assert send(body if isinstance(body, bytes) else body.encode()) == FIELD


@pytest.mark.parametrize("depth", [500, 940, 960, 980, 3000, 100_000])
@pytest.mark.parametrize("where", ["x", "speculation"])
def test_a_deep_body_is_passed_on(where, depth):
    """A body that cannot be parsed is left to SGLang's own parser."""
    body = b'{"text": "a", "speculation": {"trace": true}, "%s": ' % where.encode() + b"[" * depth + b"]" * depth + b"}"
    field = send(body, chunk=len(body))
    assert field is not None or depth >= 900


HICACHE = "/hicache/storage-backend"


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_that_generates_has_it(path):
    assert send(BODY.encode(), path, chunk=7) == FIELD


@pytest.mark.parametrize(
    ("path", "scope", "found"),
    [
        ("/v1/embeddings", {}, None),
        ("/generate", {"method": "PUT"}, FIELD),  # SGLang's takes both methods
        # Behind a proxy paths begin with its prefix.
        ("/x/y/generate", {"root_path": "/x/y"}, FIELD),
        ("/x//generate", {"root_path": "/x/"}, FIELD),
        ("//generate", {"root_path": "/"}, FIELD),
        ("/generate", {"root_path": "/x"}, FIELD),
        (HICACHE, {"method": "GET"}, None),
    ],
)
def test_paths_and_methods(path, scope, found):
    assert send(BODY.encode(), path, **scope) == found


@pytest.mark.parametrize(("body", "found"), [(BODY, FIELD), ('{"text": "a"}', '{"enabled": false}')])
def test_a_header_says_it_where_a_router_drops_the_field(body, found):
    assert send(body.encode(), headers=[(b"x-request-id-speculation", b'{"enabled": false}')]) == found


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_texts_in_a_header_are_those_that_were_written(encoding):
    header = '{"candidates": ["größer"]}'
    assert send(b'{"text": "a"}', headers=[(b"x-request-id-speculation", header.encode(encoding))]) == header


@pytest.mark.parametrize("value", [None, 1, "x", [], {"trace": 1}, {"candidates": ["yes", "no"]}])
def test_whatever_the_field_holds_is_kept(value):
    """It is checked where every request passes, that of a program, too."""
    assert json.loads(send(json.dumps({"text": "a", "speculation": value}).encode())) == value


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", "/pd_role_switch"), ("POST", "/set_internal_state"), ("PUT", HICACHE), ("DELETE", HICACHE)),
    ],
)
def test_routes_that_would_change_the_target_or_its_cache(method, path):
    status, message = send(b"{}", path=path, method=method)
    assert status == 400 and f"DSPARK does not serve {path} yet" in message


OURS = DSparkServer(DSparkConfig(), None, dummy_draft=False)
PARTS = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
NUMBERS = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": True}
PICTURES = "Qwen3VLForConditionalGeneration"


def checked(ids=(5,), parameters=None, request=None, architecture="LlamaForCausalLM", server=OURS, **fields):
    """Return the fields of a request that travel on after its check.

    Args:
        parameters: sampling parameters.
        request: fields of the body.
        server: attached to SGLang's arguments.
        fields: fields of what travels.
    """
    named = {"rid": "a", "input_text": "a", "input_ids": array("q", ids)}
    made = {**named, **PARTS, **NUMBERS, "sampling_params": SamplingParams(**(parameters or {}))}
    tokenized = TokenizedGenerateReqInput(**made | fields)
    target = model_config(architecture)
    manager = partly(TokenizerManager, model_config=target, server_args=server_args(target))
    if server is not None:
        attach(manager.server_args, server)
    check_request(tokenized, manager, GenerateReqInput(text="a", **(request or {})), "a", ids)
    return tokenized


@pytest.mark.parametrize("server", [None, TargetOnly("of its target")])
def test_another_engine_of_the_process_checks_nothing(server):
    """Hooks stay when the engine with DSPARK has ended."""
    assert checked(request={"custom_logit_processor": "x"}, server=server).input_ids.tolist() == [5]


UNSERVED = {
    "custom_logit_processor": "x", "input_embeds": [[0.5]], "watermark": {"key": 1},
    "return_sampling_mask": True, "token_indices_to_pool": [1],
    "sampling_logprobs_mode": "selected", "return_flat_raw_top_logprobs": True,
    "return_flat_raw_output_top_logprobs": True,
}  # fmt: skip
# Of a wrong type: SGLang's own decoder in the scheduler raises over them, and nothing there catches that.
FIELDS = {
    "logprob_start_len": [1], "top_logprobs_num": [2, 3], "token_ids_logprob": ["a"], "priority": "high",
    "extra_key": {"a": 1}, "return_logprob": [True], "rid": 5,
}  # fmt: skip
PARAMETERS = [
    *(("top_k", 1.5), ("n", "x"), ("ignore_eos", "x"), ("regex", 3), ("json_schema", {"type": "object"})),
    *(("custom_params", {"mine": {"a": [1]}}), ("custom_params", [1])),
]
BEYOND = "which is no token id; pass integers from 0 to 255$"
# What is asked, and what is said of it.
REFUSED = [
    *(({"request": {field: value}}, f"not serve {field}=.*; drop the field") for field, value in UNSERVED.items()),
    *(
        ({"parameters": {name: value}}, f"DSPARK does not serve sampling_params.{name}=.*; drop it")
        for name, value in (("watermark", {"enabled": True}), ("beam_width", 4))
    ),
    *(({"ids": ids}, f"^input_ids holds {named}, {BEYOND}") for ids, named in (([5, -1], -1), ([2**40, 1], 2**40))),
    ({"ids": [256]}, f"^input_ids holds 256, {BEYOND}"),
    ({"ids": []}, "the prompt has no token"),
    ({"ids": [], "session_params": SessionParams(rid="r")}, "the prompt has no token"),
    *(({name: value}, f"at `{name}") for name, value in FIELDS.items()),
    ({"session_params": SessionParams(id=3)}, "got `int` - at `session_params.id"),
    *(({"parameters": {name: value}}, f"at `sampling_params.{name}") for name, value in PARAMETERS),
    ({"parameters": {"top_k": 2**31}}, "^sampling_params.top_k=2147483648 is out of range"),
    ({"parameters": {"min_new_tokens": 2**40, "max_new_tokens": None}}, "min_new_tokens=1099511627776 is out of range"),
    *(
        ({"parameters": {"logit_bias": {"5": bias}}}, f"^sampling_params.logit_bias of token 5 is {said}")
        for bias, said in ((1e39, r"1e\+39"), (float("inf"), "inf"), (float("nan"), "nan"))
    ),
    *(
        ({"return_logprob": True, "top_logprobs_num": most}, f"^top_logprobs_num={most} is out of range; pass 0 to 256")
        for most in (257, -1)
    ),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_is_refused_is_named(asked, said):
    with pytest.raises(ValueError, match=said):
        checked(**asked)


@pytest.mark.parametrize("field", ["video_data", "audio_data"])
@pytest.mark.parametrize("architecture", [PICTURES, "Mistral3ForConditionalGeneration"])
def test_media_that_are_not_tried(field, architecture):
    with pytest.raises(ValueError, match=f"does not serve {field} yet, only text and images"):
        checked(request={field: ["x.mp4"]}, architecture=architecture)


USUAL = {"priority": 3, "extra_key": "k", "token_ids_logprob": [1, 2], "routing_key": "r", "return_logprob": True}
HARMLESS = {"stop": ["a", "b"], "logit_bias": {"5": float("-inf"), "6": 1.0}, "custom_params": {"mine": {"a": 1}}}


@pytest.mark.parametrize(
    "asked",
    [
        *({"ids": ids} for ids in ([0], [255, 0, 3], [True])),
        {"ids": [], "session_params": SessionParams(id="s")},  # SGLang looks at what earlier turns have brought
        {"parameters": HARMLESS | {"top_k": 2**31 - 1}, **USUAL},
        {"request": {"image_data": ["x.png"]}, "architecture": PICTURES},
        {"top_logprobs_num": 257},  # of a request without log-probabilities
    ],
    ids=str,
)
def test_what_is_served_passes(asked):
    assert checked(**asked).priority == asked.get("priority")


@pytest.mark.parametrize(("given", "left"), [([3, 2**40, -1, 255, 256], {3, 255}), ([2**40], set()), (None, None)])
def test_stop_tokens_that_cannot_come_are_left_out(given, left):
    """A neighbour with a minimum length would have SGLang look them up."""
    assert checked(parameters={"stop_token_ids": given}).sampling_params.stop_token_ids == left


def test_workers_serve_our_application_and_a_failure_ends_the_server(monkeypatch):
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "")
    monkeypatch.setattr(Multiprocess, "handle_quit", None, raising=False)
    heard = []
    before = signal.signal(signal.SIGQUIT, lambda number, frame: heard.append(number))
    try:
        mount(server_args(tokenizer_worker_num=2))
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == APP_OF_WORKERS
    supervisor = Multiprocess.__new__(Multiprocess)
    supervisor.signal_queue = [signal.SIGQUIT]
    supervisor.handle_signals()
    assert heard == [signal.SIGQUIT]


REPLICAS = 3


def test_replicas_follow_each_other_when_all_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = []

    def start(replica):
        time.sleep(0.1 * replica)
        told.append(("here", replica))
        with turn("a start", replica, REPLICAS):
            told.append(("begins", replica))
            time.sleep(0.05)
            told.append(("ends", replica))

    threads = [Thread(target=start, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert {what for what, _ in told[:REPLICAS]} == {"here"}
    assert told[REPLICAS:] == [(what, replica) for replica in range(REPLICAS) for what in ("begins", "ends")]
    assert list(tmp_path.iterdir()) == []  # the last one takes the file away


@pytest.mark.parametrize("seed", [-2, -(2**63), 0, 2**63 - 1])
def test_samples_of_a_request_have_the_seeds_that_follow_its_own(seed):
    """As 64-bit patterns: sample k has the text of a request with the seed plus k, negative or not."""
    shared = SamplingParams(sampling_seed=seed)
    sent = []
    for _ in range(3):
        sample = SimpleNamespace(sampling_params=shared)
        seed_each(None, sample)
        sent.append(sample.sampling_params.sampling_seed)
    assert [(each - seed) % 2**64 for each in sent] == [0, 1, 2]
    assert all(-(2**63) <= each < 2**63 for each in sent)
