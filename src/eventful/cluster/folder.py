"""The folder of a run: one process at a time, its settings, and what it says of itself."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eventful import files
from eventful.cluster.registry import LEDGER
from eventful.cluster.sources import Plan
from eventful.cluster.status import STATUS
from eventful.cluster.store import Store
from eventful.errors import ConfigError, RunError
from eventful.pipeline.results import LINES, PARTS

STATE, SUMMARY, EVENTS = "state", "cluster.json", "events.jsonl"
LOCK, SETTINGS = "lock", "settings.json"


@contextmanager
def run_folder(out: Path, plan: Plan, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """The folder of a run, for this process alone.

    Raises:
        ConfigError: There is a run already, or something else.
        RunError: Another process runs there, or the run there has other settings.
    """
    state = out / STATE
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one.")
    there = (state / LEDGER).is_file()
    if out.exists() and not there and not _bare(out):
        raise ConfigError(f"{out} is not empty and holds no run. Choose another with --out.")
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"Another process runs {out}. End it first.") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        began = there and (overwrite or _began(state / LEDGER))
        if began and not (resume or overwrite):
            raise ConfigError(
                f"{out} holds a run. Go on with it with --resume, replace it with --overwrite, or "
                "choose another folder with --out."
            )
        if there and (overwrite or not began):
            _clear(out)
        _delete_partial(out)
        _check_settings(state / SETTINGS, plan, resumed=began and resume)
        yield


def read_status(out: Path) -> dict[str, Any]:
    """What the run in a folder says of itself, with `alive`.

    Raises:
        RunError: There is no run.
    """
    try:
        found = json.loads((out / STATE / STATUS).read_text(encoding="utf-8"))
        age = time.time() - found["time"]
        known = {"registry", "workers", "readers", "streams", "problems", "events"}
        if not known <= found.keys():
            raise KeyError(min(known - found.keys()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise RunError(f"{out} holds no run of a cluster. Name its folder with --out.") from None
    return {**found, "alive": _holder(out) is not None, "age": age}


def signal_run(out: Path, number: int) -> None:
    """Send a signal to the driver of a folder.

    Raises:
        RunError: It does not run.
    """
    read_status(out)  # raises where there was no run
    holder = _holder(out)
    if holder is None:
        raise RunError(f"Nothing runs in {out}. Start it with: eventful cluster run --resume")
    os.kill(holder, number)


def _holder(out: Path) -> int | None:
    """The process that runs the cluster of a folder.

    The number in the lock's file is that of a process which holds the lock. One in the status may
    be of a run that died, and belong to another program by now.
    """
    with suppress(OSError, ValueError), (out / STATE / LOCK).open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(lock.read())
    return None


def _bare(out: Path) -> bool:
    """Whether a folder has nothing but what a start that failed leaves."""
    if not out.is_dir():
        return False
    left = {path.name for path in out.iterdir()} - {STATE}
    state = out / STATE
    if state.is_dir():
        left |= {path.name for path in state.iterdir()} - {LOCK, SETTINGS, STATUS, EVENTS}
    return not left


def _began(ledger: Path) -> bool:
    """Whether a run got as far as a first frame; one that did not is no loss."""
    store = Store(ledger)  # raises for one that is damaged
    try:
        return bool(store.fact("done")) or any(a.position >= 0 for a in store.accounts())
    finally:
        store.close()


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


def _delete_partial(out: Path) -> None:
    """Delete files that a process was writing when it was killed."""
    for folder in (out, out / PARTS["parquet"], out / STATE, out / STATE / "snapshots"):
        for path in folder.glob(f"*{files.PARTIAL}"):
            path.unlink(missing_ok=True)
