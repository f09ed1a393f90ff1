"""SGLang's application as each of several tokenizer workers serves it (``--tokenizer-worker-num``).

uvicorn starts these processes by the path of an application, which they import. SGLang loads no plugins there.
"""

from functools import cache

from fastapi import FastAPI
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id, read_from_shared_memory
from sglang.srt.plugins import load_plugins

from sglang_dspark.engine import hooks
from sglang_dspark.engine.api.http import add_to
from sglang_dspark.engine.compat.arguments import speculating


def __getattr__(name: str) -> FastAPI:
    if name == "app":
        return _application()
    raise AttributeError(name)


@cache
def _application() -> FastAPI:
    """Return SGLang's application with ours in it. SGLang's first process has left its arguments in shared memory."""
    load_plugins()
    from sglang.srt.entrypoints.http_server import app

    _ports, args, _scheduler = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    hooks.install(args, "routes", *(() if speculating(args) is None else ("front_end",)))
    add_to(app, args)
    return app
