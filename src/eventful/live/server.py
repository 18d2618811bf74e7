"""Serves the page: the socket, uvicorn, and what is printed when it is ready."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from eventful.errors import ConfigError
from eventful.live.guard import Guard

_MOST_CONNECTIONS = 128
_PATIENCE = 2  # seconds for open connections at the end


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 for any that is free.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error}). Choose another --port or --host."
        ) from None
    return made


def address_of(bound: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class Server(uvicorn.Server):
    """uvicorn, with a call when the page can be opened."""

    def __init__(self, app: Guard, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # it would show a token in an address
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=_PATIENCE,
                ws_max_size=4096,
                ws_max_queue=4,
                ws_per_message_deflate=False,  # pictures do not get smaller
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._ready()
