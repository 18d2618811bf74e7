"""Pages of `eventful live` for tests: made-up sources, a tiny model, and a real server."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from urllib.parse import parse_qsl

import torch

from eventful.errors import SourceError
from eventful.live.admission import Allowed
from eventful.live.app import Page, make_app
from eventful.live.feed import open_live
from eventful.live.groups import Group
from eventful.live.guard import Access
from eventful.live.server import Server, address_of, listen
from eventful.live.worker import Wanted, Worker
from eventful.pipeline.sources import Footage, SourceName, Taken
from eventful.pipeline.subject import Subject, open_subject


class MadeUp(Footage):
    """`made:rate=50&size=48x64&frames=20&then=end`: noise that changes in a part of the picture.

    After so many frames it ends, dies or stalls; a second size follows after `change` frames.
    """

    live = True

    def __init__(self, address: str) -> None:
        given = dict(parse_qsl(address.removeprefix("made:")))
        self.rate = float(given.get("rate", 50))
        self.length = None
        self._frames = int(given.get("frames", 10**9))
        self._then = given.get("then", "end")
        self._size = tuple(int(side) for side in given.get("size", "48x64").split("x"))
        self._change = int(given.get("change", 10**9))
        self._part = float(given.get("part", 0.5))
        self._closed = threading.Event()
        if self._then == "refuse":
            raise SourceError("made-up camera does not answer.")

    def frames(self, after: int = -1) -> Iterator[Taken]:
        make = torch.Generator().manual_seed(0)
        height, width = self._size
        picture = torch.randint(0, 255, (3, height, width), generator=make).to(torch.uint8)
        for index in range(self._frames):
            if self._closed.wait(1 / self.rate):
                return
            if index == self._change:
                picture = picture.repeat(1, 2, 1)
            rows = int(picture.shape[1] * self._part)
            noise = torch.randint(0, 255, (3, rows, width), generator=make).to(torch.uint8)
            picture = torch.cat([noise, picture[:, rows:]], dim=1)
            yield Taken(index, index / self.rate, picture)
        if self._then == "die":
            raise SourceError("made-up camera was unplugged.")
        if self._then == "stall":
            self._closed.wait()

    def close(self) -> None:
        self._closed.set()


def opened(source: SourceName) -> Footage:
    return MadeUp(source.address) if source.address.startswith("made:") else open_live(source)


def made(text: str = "", name: str | None = None) -> SourceName:
    return SourceName(name or f"made:{text}", "made", f"made:{text}")


@cache
def tiny_model() -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=2).eval()


def tiny() -> Subject:
    return open_subject(tiny_model())


@contextmanager
def working(*sources: str, **options) -> Iterator[Worker]:
    """A worker on made-up sources, without a page."""
    wanted = options.pop("wanted", Wanted())
    options.setdefault("dense_every", None)
    worker = Worker(tiny(), wanted, open_footage=opened, **options).start()
    try:
        for text in sources:
            worker.add(made(text))
        yield worker
    finally:
        worker.close()


@dataclass
class Served:
    """A page on a real server."""

    page: Page
    url: str
    port: int

    @property
    def worker(self) -> Worker:
        return self.page.worker


@contextmanager
def serving(
    *sources: str,
    access: Access | None = None,
    allowed: Allowed | None = None,
    subject: Subject | None = None,
    **options,
) -> Iterator[Served]:
    """A page on a server of its own thread."""
    options.setdefault("dense_every", 30.0)
    worker = Worker(subject or tiny(), open_footage=opened, **options)
    page = Page(worker, allowed or Allowed())
    access = access or Access()
    bound = listen(access.host, 0)
    ready = threading.Event()
    server = Server(make_app(page, access), ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(60)
    worker.start()
    for text in sources:
        worker.add(made(text))
    try:
        yield Served(page, address_of(bound), bound.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)
        page.close()
        bound.close()
        assert not thread.is_alive()


class Turns:
    """Steps of the model that run only when the test lets them, so that it can read what moves.

    A context: at its end all steps run.

    Attributes:
        waiting: whether a step waits to be let.
    """

    def __init__(self, monkeypatch) -> None:
        self.waiting = False
        self._changed = threading.Condition()
        self._left = 0
        step = Group.step

        def held(*args):
            with self._changed:
                self.waiting = True
                self._changed.wait_for(lambda: self._left > 0)
                self.waiting = False
                self._left -= 1
            return step(*args)

        monkeypatch.setattr(Group, "step", held)

    def let(self, count: int = 1) -> None:
        """Let so many more steps run."""
        with self._changed:
            self._left += count
            self._changed.notify_all()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_) -> None:
        self.let(10**9)


def wait_for(what, seconds: float = 60.0):
    """Wait until something is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "took too long"
        time.sleep(0.01)
    return found


def stepped(worker: Worker, more: int = 2) -> None:
    """Wait until every running source has made some more steps."""
    before = {channel.id: channel.steps for channel in worker.channels}
    wait_for(
        lambda: all(
            channel.steps >= before.get(channel.id, 0) + more
            for channel in worker.channels
            if channel.feed.status in ("opening", "running")
        )
    )


def header_of(message: bytes) -> dict:
    """The header of a picture as a viewer gets it."""
    (length,) = struct.unpack(">I", message[:4])
    assert message[4 + length :].startswith(b"\xff\xd8")  # JPEG
    return json.loads(message[4 : 4 + length])
