"""Does `eventful live`: opens the model and the sources, and serves the page."""

from __future__ import annotations

import json
import os
import sys

import typer

from eventful.cli.live import Addable, Seen, Served
from eventful.errors import NoMatchError
from eventful.extras import require
from eventful.live.admission import Allowed, UrlRule
from eventful.live.guard import Access
from eventful.live.worker import Wanted, Worker
from eventful.modelspec.size import parse_size
from eventful.pipeline.demo import clip
from eventful.pipeline.sources import SourceName, find_sources, missing_file
from eventful.pipeline.subject import Subject, open_subject
from eventful.surgery.inspection import inspect


def run(seen: Seen, served: Served, addable: Addable, as_json: bool) -> None:
    """Serve the page until it is interrupted."""
    for library in ("fastapi", "uvicorn", "websockets", "PIL", "av"):
        require(library)  # before any work is done
    names = frozenset(name.lower() for name in served.allow_host or ())
    access = Access(served.host, served.token or None, names)
    allowed = Allowed(
        tuple(addable.allow_folder or ()),
        tuple(UrlRule.parse(text) for text in addable.allow_url or ()),
        addable.allow_camera,
        round(addable.upload_mb * 1e6),
    )
    wanted = Wanted(seen.preset)
    sources = _sources(seen)
    subject = _subject(seen)
    most = max(addable.max_sources, len(sources))
    worker = Worker(subject, wanted, score=seen.score, most=most)
    _serve(worker, sources, seen.loop or not seen.sources, access, allowed, served.port, as_json)


def _sources(seen: Seen) -> list[SourceName]:
    if seen.sources:
        found = find_sources(seen.sources)
        for missing in filter(None, map(missing_file, found)):
            raise missing
        return found
    path, _ = clip()
    return [SourceName("a clip of the generated world", "clip", str(path))]


def _subject(seen: Seen) -> Subject:
    subject = open_subject(seen.model, weights=seen.weights, size=parse_size(seen.size))
    subject.to(seen.device, seen.dtype.value)
    if not inspect(subject.model).matched:
        raise NoMatchError(
            f"{subject.name} has no blocks that can be made eventful; `eventful inspect` says why."
        )
    return subject


def _serve(
    worker: Worker,
    sources: list[SourceName],
    loop: bool,
    access: Access,
    allowed: Allowed,
    port: int,
    as_json: bool,
) -> None:
    from eventful.live.app import Page, make_app
    from eventful.live.memory import use_few_arenas
    from eventful.live.server import Server, address_of, listen

    use_few_arenas()
    bound = listen(access.host, port)
    page = Page(worker, allowed)

    def ready() -> None:
        worker.start()
        for source in sources:
            worker.add(source, loop=loop)
        _announce(address_of(bound), access, worker, as_json)

    server = Server(make_app(page, access), ready)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn raises it again when everything is closed
        pass
    finally:
        page.close()
        bound.close()
    raise typer.Exit(0 if server.started else 1)


def _announce(address: str, access: Access, worker: Worker, as_json: bool) -> None:
    if as_json:
        about = {"url": address, "token": access.token is not None, "pid": os.getpid()}
        print(json.dumps({**about, "model": worker.subject.name}), flush=True)
        return
    if worker.subject.random:
        print(f"{worker.subject.name} has random weights.", file=sys.stderr)
    token = "  (the first time with ?token=... behind it)" if access.token is not None else ""
    print(f"{worker.subject.name} at {address}{token}  Ctrl-C ends it.", flush=True)
