"""The live page at ``/dspark``: one HTML document that needs nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def document(needs_key: bool) -> tuple[str, str]:
    """Return the document, and the ``Content-Security-Policy`` to serve it with.

    Args:
        needs_key: whether the server answers only with an API key: the page then asks for it first.

    The policy lets the page talk to its own server alone, and run no script but its own.
    """
    folder = files(__name__)
    names = ("page.html", "page.css", "page.js")
    html, style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    filled = html.replace("{{needs_key}}", "yes" if needs_key else "no")
    filled = filled.replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return filled, policy


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
