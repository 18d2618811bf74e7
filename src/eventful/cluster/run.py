"""Runs a cluster from its start to its end: `eventful cluster run` in Python.

result = run(Path("sources.toml"), RunOptions(out=Path("cameras")))
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from eventful import files
from eventful.cluster.delivery import open_delivery
from eventful.cluster.driver import Driver
from eventful.cluster.events import Events
from eventful.cluster.links import Engine
from eventful.cluster.metrics_server import MetricsServer
from eventful.cluster.ray_engine import RayEngine
from eventful.cluster.registry import LEDGER
from eventful.cluster.sources import Plan, read_plan
from eventful.cluster.status import STATUS, metrics, status_of
from eventful.cluster.store import Store
from eventful.errors import ConfigError, EventfulError, RunError
from eventful.pipeline.results import LINES, PARTS
from eventful.pipeline.stopping import Stop, StopRequested

STATE, SUMMARY, LOCK, SETTINGS = "state", "cluster.json", "lock", "settings.json"
_TURN = 0.1  # seconds between two looks
_SAVE = 1.0  # seconds between two writings of the status


@dataclass(frozen=True)
class RunOptions:
    """How a cluster is run.

    Attributes:
        out: folder of results and state.
        address: of a Ray cluster that runs; None for one on this machine.
        metrics: HOST:PORT or PORT for Prometheus; None for none.
        stay: go on when all streams have ended, and wait for new ones.
    """

    out: Path = Path("eventful-cluster")
    resume: bool = False
    overwrite: bool = False
    address: str | None = None
    metrics: str | None = None
    stay: bool = False


@dataclass(frozen=True)
class ClusterResult:
    """A run that ended.

    Attributes:
        status: complete or interrupted.
        summary: what `cluster.json` holds.
    """

    status: str
    summary: dict[str, Any]

    @property
    def failed(self) -> dict[str, str]:
        """Messages by stream."""
        streams = self.summary["streams"]
        return {s["name"]: s["message"] for s in streams if s["state"] == "failed"}


def run(
    path: Path,
    options: RunOptions,
    *,
    stop: Stop | None = None,
    observe: Callable[[dict[str, Any]], None] = lambda status: None,
    restart: Callable[[], bool] = lambda: False,
    open_engine: Callable[[Plan, str], Engine] | None = None,
) -> ClusterResult:
    """Run what a `sources.toml` says, until all streams have ended or `stop` is requested.

    Args:
        observe: called with the status about once a second.
        restart: whether a rolling restart was asked for since the last call.
        open_engine: starts what the processes run on: Ray.

    Raises:
        EventfulError: The plan or the folder cannot be used, or Ray cannot be started.
    """
    plan = read_plan(path)
    stop = stop or Stop()
    state = options.out / STATE
    with _folder(options, plan) as lock:
        open_delivery(plan.cluster.results, options.out, state)  # raises for what is no function
        Store(state / LEDGER).close()  # and for a ledger that is damaged
        events = Events(state / "events.jsonl")
        space = f"eventful-{secrets.token_hex(4)}"
        engine = open_engine(plan, space) if open_engine else RayEngine(
            plan.cluster, space, options.address
        )  # fmt: skip
        server = MetricsServer(options.metrics) if options.metrics else None
        try:
            driver = Driver(plan, engine, *_paths(options.out, state), events)
            loop = _Loop(path, driver, state / STATUS, observe, server)
            status = loop.run(stop, restart, stay=options.stay)
            driver.stop()
            summary = _summary(driver, status, options.out)
            return ClusterResult(status, summary)
        finally:
            engine.stop()
            if server is not None:
                server.close()
            lock.close()


def _paths(out: Path, state: Path) -> tuple[str, str]:
    """Folders as other processes find them, whose working folder is another one."""
    return str(out.resolve()), str(state.resolve())


class _Loop:
    """Looks at everything again and again, and tells the world."""

    def __init__(
        self,
        path: Path,
        driver: Driver,
        file: Path,
        observe: Callable[[dict[str, Any]], None],
        server: MetricsServer | None,
    ) -> None:
        self._path, self._driver, self._file = path, driver, file
        self._observe, self._server = observe, server
        self._stamp = _stamp(path)
        self._saved = float("-inf")

    def run(self, stop: Stop, restart: Callable[[], bool], *, stay: bool) -> str:
        """Until the end; `complete` or `interrupted`."""
        try:
            while True:
                self._driver.turn()
                if restart():
                    self._driver.restarts.begin()
                self._reload()
                self._tell()
                if self._driver.complete and not stay:
                    return "complete"
                with stop.waiting():
                    time.sleep(_TURN)
        except (StopRequested, KeyboardInterrupt):
            return "interrupted"

    def _reload(self) -> None:
        """Take over a plan that has changed; one that cannot be used is told of, and ignored."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            plan = read_plan(self._path)
        except EventfulError as error:
            self._driver.events.note("sources.toml cannot be used", message=str(error))
            return
        # [cluster] is that of the start: processes have it.
        known = self._driver.plan
        changed = {s.name for s in plan.streams} & {s.name for s in known.streams}
        before = {s.name: s for s in known.streams}
        other = [s.name for s in plan.streams if s.name in changed and s != before[s.name]]
        if other or plan.cluster != known.cluster:
            self._driver.events.note(
                "changes that need a new start",
                streams=other,
                cluster=plan.cluster != known.cluster,
            )
        kept = tuple(before.get(s.name, s) for s in plan.streams)
        self._driver.plan = Plan(known.cluster, kept)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._saved < _SAVE:
            return
        self._saved = now
        status = status_of(self._driver)
        with suppress(OSError):  # a full disk: the run goes on
            files.write_json(self._file, status, indent=None)
        if self._server is not None:
            self._server.text = metrics(status)
        self._observe(status)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written."""
    try:
        found = path.stat()
    except OSError:
        return None  # an editor is about to replace it
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextmanager
def _folder(options: RunOptions, plan: Plan) -> Iterator[IO[str]]:
    """The folder of a run, for this process alone.

    Raises:
        ConfigError: There is a run already, or something else.
        RunError: Another process runs there, or the run there has other settings.
    """
    out, state = options.out, options.out / STATE
    if options.resume and options.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one.")
    there = (state / LEDGER).is_file()
    if out.exists() and not there and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty and holds no run. Choose another with --out.")
    if there and not (options.resume or options.overwrite):
        raise ConfigError(
            f"{out} holds a run. Go on with it with --resume, replace it with --overwrite, or "
            "choose another folder with --out."
        )
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"Another process runs {out}. End it first.") from None
        if there and options.overwrite:
            _clear(out)
        _check_settings(state / SETTINGS, plan, resumed=there and options.resume)
        yield lock


def _check_settings(path: Path, plan: Plan, *, resumed: bool) -> None:
    """A run that is resumed has the same model and destination."""
    spec = plan.cluster
    fixed = json.loads(json.dumps({**asdict(spec.model), "results": spec.results}, default=str))
    del fixed["device"]
    if resumed and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        differ = [f"{k} was {before.get(k)} and is {v}" for k, v in fixed.items()
                  if before.get(k) != v]  # fmt: skip
        if differ:
            raise RunError(
                f"The run in {path.parent.parent} cannot be resumed: {'; '.join(differ)}. Give the "
                "same, or choose another folder with --out."
            )
    files.write_json(path, fixed)


def _clear(out: Path) -> None:
    """Delete what a run wrote, and nothing else."""
    for name in (LINES, SUMMARY):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / PARTS["parquet"], ignore_errors=True)
    for path in (out / STATE).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _summary(driver: Driver, status: str, out: Path) -> dict[str, Any]:
    """What `cluster.json` holds."""
    found = status_of(driver)
    totals: dict[str, int] = {}
    for stream in found["streams"]:
        for name, count in (("counted", stream["counted"]), *stream["missed"].items()):
            totals[name] = totals.get(name, 0) + count
    summary = {"status": status, "frames": totals, **found}
    with suppress(OSError):
        files.write_json(out / SUMMARY, summary)
        files.write_json(out / STATE / STATUS, {**found, "status": status})
    return summary


def read_status(out: Path) -> dict[str, Any]:
    """What the run in a folder says of itself, with `alive`.

    Raises:
        RunError: There is no run.
    """
    try:
        found = json.loads((out / STATE / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(f"{out} holds no run of a cluster. Name its folder with --out.") from None
    return {**found, "alive": runs(out), "age": time.time() - found["time"]}


def runs(out: Path) -> bool:
    """Whether a process runs the cluster of a folder."""
    with suppress(OSError), (out / STATE / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def signal_run(out: Path, number: int) -> None:
    """Send a signal to the driver of a folder.

    Raises:
        RunError: It does not run.
    """
    found = read_status(out)
    if not found["alive"]:
        raise RunError(f"Nothing runs in {out}. Start it with: eventful cluster run --resume")
    os.kill(found["pid"], number)
