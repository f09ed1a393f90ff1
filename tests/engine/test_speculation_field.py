"""The ``speculation`` field on its way from the body of an HTTP request to the requests that SGLang makes of it."""

import asyncio
import json

import pytest

from sglang_dspark.engine.http import ROUTES, SpeculationMiddleware
from sglang_dspark.engine.requests import ASKED


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
