"""The ``speculation`` field on its way from the request body into ``custom_params``."""

import asyncio
import json

import pytest

from sglang_dspark.engine.api.http import SpeculationMiddleware


def send(body, path="/generate", chunk=7, **scope):
    """Return what the application behind the middleware receives, or the status and message of a refusal."""
    seen, sent = {}, []

    async def application(scope, receive, send):
        message = await receive()
        seen["body"] = message["body"]
        seen["length"] = dict(scope["headers"]).get(b"content-length")

    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    messages = [{"type": "http.request", "body": c, "more_body": i + 1 < len(chunks)} for i, c in enumerate(chunks)]

    async def receive():
        return messages.pop(0)

    async def respond(message):
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, **scope}
    asyncio.run(SpeculationMiddleware(application)(scope, receive, respond))
    if sent:
        return sent[0]["status"], json.loads(sent[1]["body"])["message"]
    assert int(seen["length"]) == len(seen["body"])
    return seen["body"]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"text": "a"}', b'{"text": "speculation"}', b"not json, speculation"])
def test_bodies_without_the_field_pass_untouched(body):
    assert send(body) == body


BODY = '{"text": "a", "speculation": {"max_verify": -1}}'
MOVED = {"text": "a", "sampling_params": {"custom_params": {"dspark": '{"max_verify": -1}'}}}


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
    assert json.loads(send(body if isinstance(body, bytes) else body.encode(), chunk=1000)) == MOVED


@pytest.mark.parametrize("depth", [500, 940, 960, 980, 3000, 100_000])
@pytest.mark.parametrize("where", ["x", "speculation"])
def test_a_deep_body_is_passed_on(where, depth):
    """A body that cannot be parsed is left to SGLang's own parser."""
    body = b'{"text": "a", "speculation": {"trace": true}, "%s": ' % where.encode() + b"[" * depth + b"]" * depth + b"}"
    answer = send(body, chunk=len(body))
    assert answer == body or b"custom_params" in answer
    if depth < 900:
        assert b"custom_params" in answer


def test_other_routes_pass_untouched():
    body = b'{"speculation": 1}'
    assert send(body, path="/v1/embeddings", chunk=len(body)) == body


@pytest.mark.parametrize(
    ("root", "path"), [("/x/y", "/x/y/generate"), ("/x/", "/x//generate"), ("/", "//generate"), ("/x", "/generate")]
)
def test_behind_a_proxy_paths_begin_with_its_prefix(root, path):
    assert b"custom_params" in send(b'{"speculation": 1}', path, root_path=root)


FIELD = '{"trace": true}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_routes_carry_it_at_the_top(path):
    body = json.dumps({"model": "m", "speculation": {"trace": True}, "custom_params": {"mine": 1}}).encode()
    assert json.loads(send(body, path)) == {"model": "m", "custom_params": {"mine": 1, "dspark": FIELD}}


def test_generate_carries_it_in_every_set_of_sampling_parameters():
    single = json.dumps({"text": "a", "speculation": {"trace": True}}).encode()
    assert json.loads(send(single))["sampling_params"] == {"custom_params": {"dspark": FIELD}}
    parameters = [{}, {"n": 2}]
    several = json.dumps({"text": ["a", "b"], "sampling_params": parameters, "speculation": {"trace": True}}).encode()
    carried = {"custom_params": {"dspark": FIELD}}
    assert json.loads(send(several))["sampling_params"] == [carried, {"n": 2, **carried}]


@pytest.mark.parametrize("value", [None, 1, "x", [], {"trace": 1}, {"candidates": ["yes", "no"]}])
def test_whatever_the_field_holds_is_moved(value):
    """It is checked where every request passes, that of a program, too."""
    moved = json.loads(send(json.dumps({"text": "a", "speculation": value}).encode()))
    assert json.loads(moved["sampling_params"]["custom_params"]["dspark"]) == value


@pytest.mark.parametrize("body", [{"sampling_params": 3}, {"sampling_params": {"custom_params": [1]}}])
def test_malformed_carriers_are_left_to_those_who_read_them(body):
    assert json.loads(send(json.dumps({"speculation": {"trace": True}, **body}).encode())) == body


def test_the_field_wins_over_what_the_body_carries_itself():
    carried = {"dspark": {"max_verify": 7}, "mine": 1}
    body = {"speculation": {"max_verify": 2}, "sampling_params": {"custom_params": carried}}
    found = json.loads(send(json.dumps(body).encode()))["sampling_params"]["custom_params"]
    assert found == {"mine": 1, "dspark": '{"max_verify": 2}'}


@pytest.mark.parametrize("path", ["/weights_checker", "/begin_weight_update", "/end_weight_update", "/pd_role_switch"])
def test_routes_that_would_change_the_target(path):
    status, message = send(b"{}", path=path)
    assert status == 400 and f"DSPARK does not serve {path} yet" in message


@pytest.mark.parametrize(("method", "served"), [("PUT", False), ("DELETE", False), ("GET", True)])
def test_a_storage_behind_the_host_cache_can_be_asked_for_and_not_attached(method, served):
    found = send(b"{}", path="/hicache/storage-backend", method=method)
    assert found == b"{}" if served else found[0] == 400


def test_a_body_may_be_put_as_well():
    """SGLang's /generate takes both methods."""
    assert json.loads(send(BODY.encode(), method="PUT")) == MOVED
