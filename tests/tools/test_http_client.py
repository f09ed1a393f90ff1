"""Requests of command line tools to a server."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_dspark.tools.launch import JsonClient


@pytest.fixture
def keys():
    """The keys that a server was shown, whose first answer leads elsewhere, and its URL."""
    shown = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            shown.append(self.headers["Authorization"])
            self.send_response(302 if self.path == "/first" else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield shown, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_key_does_not_follow_a_redirection(keys):
    shown, url = keys
    assert JsonClient("--url", url, "a", timeout_s=60, api_key="secret").request("/first") == {}
    assert shown == ["Bearer secret", None]
