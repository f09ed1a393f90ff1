"""SGLang's application as each of several tokenizer workers serves it (``--tokenizer-worker-num``).

uvicorn starts these processes by the path of an application, which they import. SGLang loads no plugins there.
"""

from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id, read_from_shared_memory
from sglang.srt.plugins import load_plugins

from sglang_dspark.engine.api.http import add_to
from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.launch import hooks

__all__ = ["app"]

load_plugins()
_ports, _args, _scheduler = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
hooks.install(_args, "routes", *(() if speculating(_args) is None else ("front_end",)))
add_to(app, _args)
