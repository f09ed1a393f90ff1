"""Writes docs/sglang_flags.md: ``python -m sglang_dspark.tools.sglang_flags > docs/sglang_flags.md``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable

from sglang_dspark.engine.api import served_requests
from sglang_dspark.engine.startup import served
from sglang_dspark.engine.support import SERVED_SGLANG

_WIDTH = 120
_PAGE = """\
# Every flag and request field of SGLang, and what DSPARK does with it

Every flag and every request field of SGLang (`{sglang}`) is on this page. It is written from the lists that the
server's own checks read, `sglang_dspark/engine/startup/served.py` and
`sglang_dspark/engine/api/served_requests.py`; a test compares them with SGLang's.

A refusal ends the start with a message, or answers the request with HTTP 400; both name the flag or field and the
remedy.

## Flags

### Refused

| flag | served values | otherwise |
|---|---|---|
{refused}

### With a rule of their own

| flag | rule |
|---|---|
{elsewhere}

### Served as on a plain server

For many of these that is known from reading SGLang: what they change lies outside of what DSPARK replaces.

{served}

### Of parts that few targets have

They belong to mixtures of experts, state-space models and other modalities. DSPARK reads none of them; of those of
experts none but the defaults was tried.

{other_models}

### Of features that are refused

They only adjust one of the refused flags above.

{refused_features}

## Request fields

The fields of `/generate`; the OpenAI routes translate theirs into these.

* Refused when they are set:
{refused_fields}
* Refused sampling parameters: `watermark`, and `beam_width` above 1
* Served as on a plain server:
{served_fields}
* Served sampling parameters, of which the last five are SGLang's own:
{parameters}
* Of images, and of models that are refused:
{other_models_fields}
* Of features that are refused:
{refused_features_fields}

## Environment variables

`SGLANG_SANITIZE_NAN_LOGITS` and `SGLANG_ENABLE_ASYNC_ASSERT` do to the target's logits what SGLang's sampler does
without DSPARK. `SGLANG_RUST_SERVER=1`, `SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1` and
`SGLANG_GRPC_PORT` end the start. Most other variables of SGLang were not examined.

## Routes

Routes that would change the target of a running server, free its memory, give it another server's work or set what
other speculative algorithms read answer HTTP 400:
{refused_routes}

Of these, only GET is served: {refused_changes}. The field `speculation` is read on `/generate`, `/v1/completions` and
`/v1/chat/completions`; other routes serve requests with the server's policy.
"""


def table() -> str:
    """The page."""
    elsewhere = "\n".join(f"| `{served.flag_of(name)}` | {said} |" for name, said in served.CHECKED_ELSEWHERE.items())
    return _PAGE.format(
        sglang=SERVED_SGLANG,
        refused=_rows(served.REFUSED_FLAGS),
        elsewhere=elsewhere,
        served=_listed(map(served.flag_of, served.SERVED_FLAGS)),
        other_models=_listed(map(served.flag_of, served.OTHER_MODELS_FLAGS)),
        refused_features=_listed(map(served.flag_of, served.REFUSED_FEATURES_FLAGS)),
        refused_fields=_listed(served_requests.REFUSED_FIELDS),
        served_fields=_listed(served_requests.SERVED_FIELDS),
        parameters=_listed(served_requests.SAMPLING_PARAMETERS),
        other_models_fields=_listed(served_requests.OTHER_MODELS_FIELDS),
        refused_features_fields=_listed(served_requests.REFUSED_FEATURES_FIELDS),
        refused_routes=_listed(served_requests.REFUSED_ROUTES),
        refused_changes=_listed(served_requests.REFUSED_CHANGES),
    )


def _rows(refusals: Iterable[served.Refusal]) -> str:
    return "\n".join(f"| `{served.flag_of(flag.name)}` | {_allowed(flag)} | {flag.remedy} |" for flag in refusals)


def _allowed(refusal: served.Refusal) -> str:
    return ", ".join(f"`{value}`" for value in refusal.allowed if value is not None and value not in ([], {})) or "none"


def _listed(names: Iterable[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(listed, _WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(table())
