"""The application: the page, its files, requests that change what runs, and the connection.

Every bad request is answered with a number from 400 to 499 and one sentence, as JSON, and changes
nothing. Answers never repeat what was sent: it may hold credentials.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

from eventful import __version__
from eventful.errors import ConfigError, EventfulError
from eventful.live import metrics
from eventful.live.admission import Allowed, Refused
from eventful.live.groups import CHOICES, needs_share
from eventful.live.guard import Access, Guard
from eventful.live.uploads import Uploads
from eventful.live.viewers import Hub
from eventful.live.worker import Worker
from eventful.pipeline.sources import SourceName

_MOST_JSON = 16_384  # bytes of a request
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Page:
    """What the requests act on."""

    def __init__(self, worker: Worker, allowed: Allowed) -> None:
        self.worker, self.allowed = worker, allowed
        self.hub = Hub(worker, self.about)
        self.uploads = Uploads(allowed.upload_bytes)

    def about(self) -> dict[str, Any]:
        """The state of the page, without its sources."""
        worker, wanted = self.worker, self.worker.wanted
        return {
            "version": __version__,
            "model": worker.subject.name,
            "random": worker.subject.random,
            "preset": wanted.preset,
            "presets": list(CHOICES),
            "share": wanted.effective,
            "automatic": wanted.share is None,
            "needs_share": needs_share(wanted.preset),
            "paused": wanted.paused,
            "viewers": len(self.hub.viewers),
            "notice": list(worker.notice),
            "kinds": self.allowed.kinds,
            "most_sources": worker.most,
            "upload_mb": self.allowed.upload_bytes / 1e6,
        }

    def add(self, source: SourceName, *, loop: bool) -> dict[str, Any]:
        """Add a source, and say which."""
        try:
            channel = self.worker.add(source, loop=loop)
        except ConfigError as error:
            raise Refused(409, str(error)) from None
        return {"id": channel.id, "name": channel.name}

    def remove(self, number: str) -> None:
        """Remove a source, with its file if it was uploaded."""
        channel = next((c for c in self.worker.channels if c.id == number), None)
        if channel is None:
            raise Refused(404, "There is no such source.")
        self.worker.remove(number)
        self.uploads.remove(channel.feed.source.address)

    def close(self) -> None:
        """Stop everything."""
        self.worker.close()
        self.hub.close()
        self.uploads.close()


def make_app(page: Page, access: Access) -> Guard:
    """The application behind its guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(page.close)

    app = FastAPI(
        title="eventful live", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    app.add_exception_handler(HTTPException, _plain)
    _add_reading(app, page)
    _add_changes(app, page)
    _add_sources(app, page)

    @app.websocket("/ws")
    async def watch(socket: WebSocket) -> None:
        await _watch(page.hub, socket)

    return Guard(app, access)


def _add_reading(app: FastAPI, page: Page) -> None:
    """Requests that change nothing."""
    folder = resources.files("eventful.live") / "page"

    def serve(name: str, kind: str) -> Callable[[], Response]:
        content = (folder / name).read_bytes()
        return lambda: Response(content, media_type=kind)

    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, serve(name, kind), methods=["GET"])

    @app.get("/api/state")
    def state() -> Response:
        sources = [channel.state() for channel in page.worker.channels]
        return JSONResponse({**page.about(), "sources": sources})

    @app.get("/metrics")
    def numbers() -> Response:
        return Response(metrics.text(page.worker, page.hub), media_type=metrics.TYPE)

    @app.get("/healthz")
    def health() -> Response:
        good = page.worker.alive
        return Response("ok\n" if good else "the model's thread has ended\n", 200 if good else 503,
                        media_type="text/plain")  # fmt: skip


def _add_changes(app: FastAPI, page: Page) -> None:
    """Requests that change what runs."""

    @app.patch("/api/settings")
    async def settings(request: Request) -> Response:
        async def change() -> Any:
            given = _known(await _body(request), {"preset": str, "share": float, "paused": bool})
            if given.get("preset", CHOICES[0]) not in CHOICES:
                raise Refused(422, f"preset is one of {', '.join(CHOICES)}.")
            try:
                page.worker.change(**given)
            except ConfigError as error:
                raise Refused(422, str(error)) from None
            return page.about()

        return await _answered(change)

    @app.post("/api/reset")
    async def reset(request: Request) -> Response:
        async def change() -> Any:
            given = _known(await _body(request), {"source": str})
            try:
                page.worker.reset(given.get("source"))
            except KeyError:
                raise Refused(404, "There is no such source.") from None
            return {}

        return await _answered(change)


def _add_sources(app: FastAPI, page: Page) -> None:
    """Requests that add and remove sources."""

    @app.post("/api/sources")
    async def add(request: Request) -> Response:
        async def change() -> Any:
            given = _known(await _body(request), {"source": str, "loop": bool})
            _check_room(page)
            source = await asyncio.to_thread(page.allowed.admit, given.get("source"))
            return page.add(source, loop=given.get("loop", False))

        return await _answered(change, 201)

    @app.delete("/api/sources/{number}")
    async def remove(number: str) -> Response:
        async def change() -> Any:
            page.remove(number)
            return {}

        return await _answered(change)

    @app.post("/api/uploads")
    async def upload(request: Request) -> Response:
        async def change() -> Any:
            name = request.query_params.get("name", "")
            _check_room(page)
            page.uploads.check(name, request.headers.get("content-length"))
            path = await page.uploads.receive(name, request.stream())
            source = await asyncio.to_thread(page.uploads.opened, path, name)
            try:
                return page.add(source, loop=True)
            except Refused:
                page.uploads.remove(source.address)
                raise

        return await _answered(change, 201)


async def _watch(hub: Hub, socket: WebSocket) -> None:
    """Serve one viewer; the state and pictures follow."""
    if hub.full:
        await socket.close(1013)
        return
    await socket.accept()
    try:
        await hub.serve(socket, socket.receive_text)
    except ConfigError as error:
        await socket.close(1008, str(error)[:100])
    except (WebSocketDisconnect, RuntimeError):  # gone, perhaps in the middle of a picture
        pass


async def _answered(change: Callable[[], Awaitable[Any]], status: int = 200) -> Response:
    """The answer to a request, whatever became of it."""
    try:
        return JSONResponse(await change(), status)
    except Refused as refused:
        return JSONResponse({"error": str(refused)}, refused.status)
    except EventfulError:
        return JSONResponse({"error": "This cannot be done."}, 422)
    except ClientDisconnect:
        return Response(status_code=499)


async def _plain(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "There is nothing here.", 405: "This address takes other methods."}
    return JSONResponse({"error": text.get(status, "This request cannot be answered.")}, status)


def _check_room(page: Page) -> None:
    if len(page.worker.channels) >= page.worker.most:
        raise Refused(409, f"There are {page.worker.most} sources, the most at one time.")


async def _body(request: Request) -> Any:
    """The JSON object that a request holds."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(415, "Send JSON, with the content type application/json.")
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_JSON:
            raise Refused(413, f"A request has at most {_MOST_JSON} bytes.")
    try:
        return json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Refused(400, "This is no JSON.") from None


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _known(given: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """The values of a request; others, and other types, are refused."""
    if not isinstance(given, dict):
        raise Refused(422, "Send a JSON object.")
    for name, value in given.items():
        if name not in kinds:
            raise Refused(422, f"The names are {', '.join(kinds)}.")
        number = kinds[name] is float and isinstance(value, int) and not isinstance(value, bool)
        empty = value is None and name in ("share", "source")
        if not (isinstance(value, kinds[name]) or number or empty):
            raise Refused(422, f"{name} has another type: it is a {_TYPES[kinds[name]]}.")
    return dict(given)


_TYPES: dict[type, str] = {str: "text", float: "number", bool: "true or false"}
