"""A process starts several tokenizer workers; tests/server/test_replicas.py has them at work."""

import os
import signal

from sglang_objects import server_args
from uvicorn.supervisors import Multiprocess

from sglang_dspark.engine.http import APP_OF_WORKERS, mount


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
