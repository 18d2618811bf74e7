"""Who may use the page: checks ahead of every request, and headers on every answer.

A page on one's own machine can be reached by every web site that the browser opens. So the names
under which it may be asked for are limited (a web site could point a name of its own at this
machine), requests that come from other pages are refused, and where the page can be reached from
other machines, a token is needed.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from eventful.errors import ConfigError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COOKIE = "eventful_session"
LEAST_TOKEN = 16  # characters
_SESSION = 12 * 3600.0  # seconds
_MOST_SESSIONS = 256
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN = frozenset({"/healthz"})  # without a token: says nothing but that the page works

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
_ENTER = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" '
    'content="0;url=/"><link rel="icon" href="/icon.svg"><title>eventful live</title>'
    '<a href="/">Open the page</a></html>'
)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class Access:
    """Who may use the page.

    Args:
        host: the address that is listened on.
        token: None where none is needed, on loopback alone.
        names: hosts by which the page may be asked for, besides those of this machine.

    Raises:
        ConfigError: A token is needed, or too short.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    names: frozenset[str] = frozenset()
    _sessions: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines in, so a token is needed: set "
                f"EVENTFUL_TOKEN, or give --token, with at least {LEAST_TOKEN} characters."
            )
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            raise ConfigError(f"A token has at least {LEAST_TOKEN} characters.")

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is refused: a status and a text; None if it is not."""
        headers = _headers(scope)
        if headers is None:
            return 400, "A header is given twice."
        host = headers.get("host", "")
        if not self._knows(host):
            return 421, "The page is not served under this name; see --allow-host."
        origin = headers.get("origin")
        if origin is not None and not _same(origin, host):
            return 403, "Requests of other pages are refused."
        if headers.get("sec-fetch-site") == "cross-site" and not _is_visit(scope, headers):
            return 403, "Requests of other pages are refused."
        if self.token is None or scope["path"] in _OPEN or self._may(scope, headers):
            return None
        return 401, (
            "A token is needed. Open the page once with ?token=TOKEN behind its address, or send "
            "the header Authorization: Bearer TOKEN."
        )

    def entering(self, scope: Scope) -> bool:
        """Whether the page is opened with the token in its address."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            return False
        return self._right(*parse_qs(scope["query_string"].decode("latin-1")).get("token", [])[:1])

    def open_session(self) -> str:
        """A cookie that stands for the token from now on."""
        now = time.monotonic()
        kept = [(name, end) for name, end in self._sessions.items() if end > now]
        self._sessions = dict(kept[-_MOST_SESSIONS + 1 :])
        name = secrets.token_urlsafe(32)
        self._sessions[name] = now + _SESSION
        return f"{COOKIE}={name}; HttpOnly; SameSite=Strict; Path=/; Max-Age={int(_SESSION)}"

    def _may(self, scope: Scope, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._right(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        known = cookie is not None and self._sessions.get(cookie.value, 0.0) > time.monotonic()
        return known or self.entering(scope)

    def _right(self, given: str = "") -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _knows(self, host: str) -> bool:
        """Whether the page may be asked for under a name; a number cannot be a trick of DNS."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
        except ValueError:
            return False
        if name in _LOCAL or name in self.names or name == self.host.lower():
            return True
        return not is_loopback(self.host) and _is_number(name)


class Guard:
    """Checks every request before the application sees it (ASGI)."""

    def __init__(self, app: Callable[..., Awaitable[None]], access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._access.refusal(scope)
        if scope["type"] == "websocket":
            if refusal is not None:
                await send({"type": "websocket.close", "code": 1008})  # answered with 403
                return
            await self._app(scope, receive, send)
            return
        if refusal is not None:
            await answer(send, refusal[0], json.dumps({"error": refusal[1]}), "application/json")
        elif self._access.entering(scope):
            cookie = [("Set-Cookie", self._access.open_session())]
            await answer(send, 200, _ENTER, "text/html; charset=utf-8", cookie)
        else:
            await self._app(scope, receive, _with_headers(send))


async def answer(
    send: Send, status: int, text: str, kind: str, more: Iterable[tuple[str, str]] = ()
) -> None:
    """Answer a request without the application."""
    content = text.encode()
    given = [*HEADERS.items(), ("Content-Type", kind), ("Content-Length", str(len(content))), *more]
    if status == 401:
        given.append(("WWW-Authenticate", "Bearer"))
    headers = [(name.lower().encode(), value.encode()) for name, value in given]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _with_headers(send: Send) -> Send:
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *added]
        await send(message)

    return wrapped


def _headers(scope: Scope) -> dict[str, str] | None:
    """Headers by name in lower case; None where one that decides is given twice."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in found and name in ("host", "origin", "authorization", "sec-fetch-site"):
            return None
        found[name] = value.decode("latin-1")
    return found


def _same(origin: str, host: str) -> bool:
    """Whether a page of this origin was served under this host."""
    scheme, mark, rest = origin.partition("://")
    return bool(mark) and scheme in ("http", "https") and rest.lower() == host.lower()


def _is_visit(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether somebody followed a link to the page itself, which shows them the page alone."""
    visit = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") in (
        None,
        "document",
    )
    return visit and scope.get("method") == "GET" and scope["path"] == "/"


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
