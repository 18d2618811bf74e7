"""Runs a cluster from its start to its end: `eventful cluster run` in Python.

result = run(Path("sources.toml"), RunOptions(out=Path("cameras")))
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventful import files
from eventful.cluster.delivery import open_delivery
from eventful.cluster.driver import Driver
from eventful.cluster.events import Events
from eventful.cluster.folder import EVENTS, STATE, SUMMARY, run_folder
from eventful.cluster.links import Engine
from eventful.cluster.metrics_server import MetricsServer
from eventful.cluster.plan_file import PlanFile
from eventful.cluster.ray_engine import RayEngine
from eventful.cluster.sources import Plan, read_plan
from eventful.cluster.status import STATUS, metrics, status_of
from eventful.errors import ConfigError
from eventful.pipeline.stopping import Stop, StopRequested

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
        status: complete, interrupted, or incomplete: the streams ended, and results still wait.
        summary: what `cluster.json` holds.
    """

    status: str
    summary: dict[str, Any]

    @property
    def failed(self) -> dict[str, str]:
        """Messages by stream, of those that could not be used as well."""
        streams = self.summary["streams"]
        found = {s["name"]: s["message"] for s in streams if s["state"] == "failed"}
        return {**found, **self.summary["problems"]}

    @property
    def waiting(self) -> str:
        """How many results did not reach their destination, and why; empty if all did."""
        count, problem = (self.summary["registry"][name] for name in ("waiting", "problem"))
        if not (count or problem):
            return ""
        told = "Whether all results have reached their destination is not known."
        if count:
            told = f"{count} results have not reached their destination."
        return f"{told} --resume delivers those that are in the state folder. {problem}".strip()


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
    plan, stop = read_plan(path), stop or Stop()
    out, state = options.out, options.out / STATE
    if not plan.streams and not options.stay:
        raise ConfigError(f"{path} has no streams. Add one, or wait for them with --stay.")
    # Before anything is written: a start that is wrong leaves nothing in the way of a right one.
    open_delivery(plan.cluster.results, out, state)  # raises for what is no function
    with ExitStack() as closing:
        server = MetricsServer(options.metrics) if options.metrics else None
        if server is not None:
            closing.callback(server.close)
        closing.enter_context(
            run_folder(out, plan, resume=options.resume, overwrite=options.overwrite)
        )
        events = Events(state / EVENTS)
        space = f"eventful-{secrets.token_hex(4)}"
        engine = open_engine(plan, space) if open_engine else RayEngine(
            plan.cluster, space, options.address
        )  # fmt: skip
        closing.callback(engine.stop)
        driver = Driver(plan, engine, str(out.resolve()), str(state.resolve()), events)
        loop = _Loop(PlanFile(path, events), driver, state / STATUS, observe, server)
        status = loop.run(stop, restart, stay=options.stay)
        driver.stop()
        answer = driver.registry.answer
        if status == "complete" and (answer.get("waiting") or answer.get("problem")):
            status = "incomplete"
        return ClusterResult(status, _summary(driver, status, out))


class _Loop:
    """Looks at everything again and again, and tells the world."""

    def __init__(
        self,
        plan: PlanFile,
        driver: Driver,
        file: Path,
        observe: Callable[[dict[str, Any]], None],
        server: MetricsServer | None,
    ) -> None:
        self._plan, self._driver, self._file = plan, driver, file
        self._observe, self._server = observe, server
        self._saved = float("-inf")

    def run(self, stop: Stop, restart: Callable[[], bool], *, stay: bool) -> str:
        """Until the end; `complete` or `interrupted`."""
        try:
            while True:
                self._driver.turn()
                if restart():
                    self._driver.restarts.begin()
                self._driver.plan = self._plan.turn(self._driver.plan) or self._driver.plan
                self._tell()
                if self._driver.complete and not stay:
                    return "complete"
                with stop.waiting():
                    time.sleep(_TURN)
        except (StopRequested, KeyboardInterrupt):
            return "interrupted"

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
