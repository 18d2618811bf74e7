"""Viewers of the page, each with at most a few pictures on their way.

A viewer confirms what it has drawn, and only then gets the next picture, which is the latest there
is: a slow viewer sees fewer pictures and never old ones, and nothing queues up for it. Pictures are
drawn and encoded when a viewer is ready for one, once for all viewers that want the same.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from eventful.errors import ConfigError
from eventful.live.channels import Channel, Shown
from eventful.live.pictures import View, description, jpeg
from eventful.live.worker import Worker

EVERY = 0.5  # seconds between two states
WINDOW = 2  # pictures on their way to a viewer, of one source at most one
_LONGEST = 512  # characters of a message of a viewer


class Connection(Protocol):
    """What a viewer is connected by."""

    async def send_text(self, data: str) -> None:
        """Send a state."""

    async def send_bytes(self, data: bytes) -> None:
        """Send a picture."""


class Viewer:
    """One open page.

    Attributes:
        view: how it wants to see pictures; None while it is hidden and wants none.
        sent: number of the last picture by source, the source served last at the end.
        open: sources with a picture that it has not confirmed.
        points: number of the last point of the plots by source.
    """

    def __init__(self) -> None:
        self.view: View | None = View()
        self.sent: dict[str, int] = {}
        self.open: set[str] = set()
        self.points: dict[str, int] = {}
        self.state_open = False
        self.wake = asyncio.Event()

    def take(self, text: str) -> None:
        """One message of the page.

        Raises:
            ConfigError: It is none that a page sends.
        """
        try:
            if len(text) > _LONGEST:
                raise ValueError
            message = json.loads(text)
            kind = message["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError("A message is a JSON object with a type.") from None
        if kind == "seen":
            self.open.discard(str(message.get("source")))
            self.state_open = self.state_open and message.get("state") is None
        elif kind == "view":
            self._look(message)
        else:
            raise ConfigError("A message has the type seen or view.")
        self.wake.set()

    def _look(self, message: dict[str, Any]) -> None:
        if message.get("hidden") is True:
            self.view = None
            return
        given = {name: message[name] for name in ("overlay", "predictions", "width")
                 if name in message}  # fmt: skip
        self.view = View(**given)
        self.sent = dict.fromkeys(self.sent, 0)  # the same frames again, in the other way

    def due(self, channels: list[Channel]) -> list[tuple[Channel, Shown]]:
        """Sources with a picture that the viewer has not got and is ready for, in fair order."""
        there = {channel.id for channel in channels}
        for numbers in (self.sent, self.points):
            for gone in numbers.keys() - there:
                del numbers[gone]
        self.open &= there
        if self.view is None or len(self.open) >= WINDOW:
            return []
        turns = {name: turn for turn, name in enumerate(self.sent)}
        found = [
            (channel, shown)
            for channel in channels
            if (shown := channel.shown) is not None
            and channel.id not in self.open
            and self.sent.get(channel.id) != shown.number
        ]
        return sorted(found, key=lambda pair: turns.get(pair[0].id, -1))

    def note(self, source: str, number: int) -> None:
        """A picture is on its way."""
        self.sent.pop(source, None)
        self.sent[source] = number
        self.open.add(source)


class Hub:
    """All viewers of the page.

    Args:
        about: what every state says besides the sources.
        most: viewers at one time.

    Attributes:
        encoded: pictures drawn so far; `delivered` those sent.
    """

    def __init__(
        self, worker: Worker, about: Callable[[], dict[str, Any]], *, most: int = 16
    ) -> None:
        self.worker, self.most = worker, most
        self.viewers: set[Viewer] = set()
        self.encoded = self.delivered = 0
        self._about = about
        self._loop: asyncio.AbstractEventLoop | None = None
        # One thread: viewers share what is left of the machine beside the model.
        self._painter = ThreadPoolExecutor(1, "eventful.live.painter")
        self._made: dict[tuple[str, View], tuple[int, asyncio.Future[bytes]]] = {}
        worker.on_result = self._on_result

    @property
    def full(self) -> bool:
        """Whether no viewer may come."""
        return len(self.viewers) >= self.most

    def close(self) -> None:
        """Draw no more."""
        self._painter.shutdown(wait=False, cancel_futures=True)

    async def serve(self, socket: Connection, receive: Callable[[], Awaitable[str]]) -> None:
        """Serve one viewer until it goes.

        Args:
            receive: the next message; it raises when the viewer is gone.

        Raises:
            ConfigError: The viewer sent what no page sends.
        """
        self._loop = asyncio.get_running_loop()
        viewer = Viewer()
        self.viewers.add(viewer)
        tasks = [
            asyncio.create_task(self._listen(viewer, receive)),
            asyncio.create_task(self._send(viewer, socket)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.viewers.discard(viewer)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            if not self.viewers:
                self._made.clear()
        for result in ended:
            if isinstance(result, ConfigError):
                raise result

    async def _listen(self, viewer: Viewer, receive: Callable[[], Awaitable[str]]) -> None:
        while True:
            viewer.take(await receive())

    async def _send(self, viewer: Viewer, socket: Connection) -> None:
        next_state = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            if clock() >= next_state and not viewer.state_open:
                next_state = clock() + EVERY
                viewer.state_open = True
                await socket.send_text(json.dumps(self._state(viewer)))
            if (due := viewer.due(self.worker.channels)) and viewer.view is not None:
                channel, shown = due[0]
                viewer.note(channel.id, shown.number)
                await socket.send_bytes(await self._message(channel, shown, viewer.view))
                self.delivered += 1
                continue
            viewer.wake.clear()
            if viewer.due(self.worker.channels):
                continue
            with suppress(TimeoutError):
                wait = EVERY if viewer.state_open else max(0.01, next_state - clock())
                await asyncio.wait_for(viewer.wake.wait(), wait)

    def _state(self, viewer: Viewer) -> dict[str, Any]:
        sources = [
            channel.state(viewer.points.get(channel.id, 0)) for channel in self.worker.channels
        ]
        for source in sources:
            if source["points"]:
                viewer.points[source["id"]] = int(source["points"][-1][0])
        return {"type": "state", **self._about(), "sources": sources}

    async def _message(self, channel: Channel, shown: Shown, view: View) -> bytes:
        """A header in JSON, its length in front of it, and the picture behind it."""
        classes = self.worker.subject.classes
        header = {"source": channel.id, "number": shown.number,
                  "text": description(shown, classes)}  # fmt: skip
        content = json.dumps(header).encode()
        return struct.pack(">I", len(content)) + content + await self._picture(channel, shown, view)

    async def _picture(self, channel: Channel, shown: Shown, view: View) -> bytes:
        key = channel.id, view
        made = self._made.get(key)
        if made is None or made[0] != shown.number:
            there = {channel.id for channel in self.worker.channels}
            views = {viewer.view for viewer in self.viewers}
            self._made = {k: v for k, v in self._made.items() if k[0] in there and k[1] in views}
            work = asyncio.get_running_loop().run_in_executor(
                self._painter, jpeg, shown, view, self.worker.subject.classes
            )
            made = self._made[key] = shown.number, asyncio.ensure_future(work)
            self.encoded += 1
        return await asyncio.shield(made[1])

    def _on_result(self) -> None:
        """Called by the worker's thread: without a viewer there is nothing to do."""
        if self.viewers and self._loop is not None:
            with suppress(RuntimeError):  # the page is closing
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for viewer in self.viewers:
            viewer.wake.set()
