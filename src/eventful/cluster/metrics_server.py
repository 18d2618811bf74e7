"""A page with numbers for Prometheus, on this machine unless told otherwise."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from eventful.errors import ConfigError
from eventful.live.exposition import TYPE


class MetricsServer:
    """Serves `text` at /metrics.

    Args:
        address: PORT for this machine alone, or HOST:PORT. Names of streams and numbers are all
            that it tells, and it takes nothing.

    Attributes:
        port: that was chosen for port 0.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise ConfigError(f"--metrics is PORT or HOST:PORT, not {address!r}.")
        self.text = ""
        try:
            self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), self._handler())
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--metrics {address}: {error}. Choose another port.") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="eventful.metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                """Answer with the numbers."""
                found = self.path.partition("?")[0] == "/metrics"
                body = server.text.encode() if found else b"/metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE if found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        return Handler
