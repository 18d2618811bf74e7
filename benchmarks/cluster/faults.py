"""Faults on purpose. Each function makes one kind and says what became of the frames."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.setting import Run, Setting, audit, end_process, running
from eventful.cluster.sources import remove_stream

Found = dict[str, Any]


def workers(folder: Path, *, frames: int = 2000, kills: int = 10) -> Found:
    """Kill -9 of a worker in the middle of the work, again and again."""
    setting = Setting(folder, frames=frames, rate=10.0)  # long enough for all of them
    random.seed(3)
    recoveries: list[Found] = []
    with running(setting) as run:
        found = run.running(20)
        for _ in range(kills):
            worker = random.choice([w for w in found["workers"] if w["streams"]])
            moment = end_process(worker["pid"])
            times = _back(run, found, worker["streams"], moment)
            recoveries.append({"streams": len(times), "seconds": times})
            found = run.wait_for(
                lambda now, w=worker: _alive(now, w["name"], w["again"]) and _spread(now)
            )
        summary = run.finish()
    flat = sorted(t for each in recoveries for t in each["seconds"])
    return _result(setting, summary, frames) | {"kills": recoveries, **_spread_of(flat)}


def registry(folder: Path, *, frames: int = 1000, kills: int = 3) -> Found:
    """Kill -9 of the registry."""
    setting = Setting(folder, frames=frames)
    recoveries = []
    with running(setting) as run:
        for number in range(kills):
            found = run.running(20 * (number + 1))
            moment = end_process(found["registry"]["pid"])
            recoveries.append(_next_result(run, moment))
            run.wait_for(lambda now, n=number: now["registry"]["again"] > n)
        summary = run.finish()
    return _result(setting, summary, frames) | _spread_of(sorted(recoveries))


def readers(folder: Path, *, frames: int = 1000, kills: int = 3) -> Found:
    """Kill -9 of the reader: files go on where they were."""
    setting = Setting(folder, frames=frames)
    recoveries = []
    with running(setting) as run:
        for number in range(kills):
            found = run.running(20 * (number + 1))
            moment = end_process(found["readers"][0]["pid"])
            names = [s["name"] for s in found["streams"]]
            recoveries += _back(run, found, names, moment)
        summary = run.finish()
    return _result(setting, summary, frames) | _spread_of(sorted(recoveries))


def driver(folder: Path, *, frames: int = 1000, kills: int = 3) -> Found:
    """Kill -9 of the driver, and with it of everything; then `--resume`."""
    setting = Setting(folder, frames=frames)
    recoveries, left = [], []
    options: tuple[str, ...] = ()
    for number in range(kills):
        with running(setting, *options) as run:
            run.running(25 * (number + 1))
            run.kill()
        moment = time.monotonic()
        while (
            any(_exists(pid) for pid in run.left) and time.monotonic() < moment + 90
        ):  # Ray's agents take 62 s
            time.sleep(0.05)
        left.append(sum(_exists(pid) for pid in run.left))
        options = ("--resume",)
        with running(setting, *options) as run:
            began = time.monotonic()
            recoveries.append(_next_result(run, began))
            if number == kills - 1:
                summary = run.finish()
            else:
                run.process.send_signal(signal.SIGINT)
                run.finish(60)
    found = _result(setting, summary, frames) | _spread_of(sorted(recoveries))
    return found | {"processes_left": sum(left)}


def hang(folder: Path, *, frames: int = 1000) -> Found:
    """A worker that is stopped (SIGSTOP): alive, and without a word."""
    setting = Setting(folder, frames=frames, cluster={"deadline": 3.0})
    with running(setting) as run:
        found = run.running(20)
        worker = next(w for w in found["workers"] if w["streams"])
        moment = end_process(worker["pid"], signal.SIGSTOP)
        times = _back(run, found, worker["streams"], moment)
        run.wait_for(lambda now: _alive(now, worker["name"], worker["again"]))
        gone = not _exists(worker["pid"])
        summary = run.finish()
    return _result(setting, summary, frames) | _spread_of(sorted(times)) | {"killed": gone}


def disk(folder: Path, *, frames: int = 1500) -> Found:
    """A disk that is full for a while: a tmpfs of 40 MB, and a file that fills it."""
    setting = Setting(folder, frames=frames, cluster={"queue": 300, "snapshot_every": 0})
    setting.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(setting.out)]
    subprocess.run(mount, check=True)
    try:
        with running(setting) as run:
            run.running(20)
            filler = setting.out / "state" / "filler"
            _fill(filler)
            found = run.wait_for(lambda now: True)
            moment = time.monotonic()
            problem = _said(run, "Results wait", 20)
            time.sleep(8)
            counted = len(run.rows)
            filler.unlink()
            freed = time.monotonic()
            while len(run.rows) <= counted and time.monotonic() < freed + 30:
                time.sleep(0.02)
            back = time.monotonic() - freed
            summary = run.finish()
        out = _result(setting, summary, frames)
    finally:
        subprocess.run(["umount", str(setting.out)], check=True)
    assert found
    return out | {"seconds_full": freed - moment, "error_shown": problem, "seconds": [back]}


def camera(folder: Path, *, frames: int = 600) -> Found:
    """A camera that is taken out, and comes back under the same name; another one is new."""
    setting = Setting(folder, cameras=3, frames=frames)
    with running(setting, "--stay") as run:
        run.running(20)
        remove_stream(setting.plan, "camera 1")
        run.wait_for(lambda now: _state(now, "camera 1") == "removed")
        setting.add("camera 1")
        setting.add("late")
        run.wait_for(lambda now: _state(now, "camera 1") == "running")
        run.wait_for(
            lambda now: all(s["state"] == "ended" for s in now["streams"]) and _knows(now, "late"),
            180,
        )
        run.process.send_signal(signal.SIGINT)
        summary = run.finish(60)
    return _result(setting, summary, frames)


def rolling(folder: Path, *, frames: int = 1000) -> Found:
    """A rolling restart of both workers."""
    setting = Setting(folder, frames=frames)
    with running(setting) as run:
        found = run.running(20)
        began = time.monotonic()
        run.process.send_signal(signal.SIGHUP)
        run.wait_for(
            lambda now: (
                all(_alive(now, w["name"], w["again"]) for w in found["workers"])
                and not now["restarting"]
            )
        )
        took = time.monotonic() - began
        summary = run.finish()
    return _result(setting, summary, frames) | {"restart_seconds": took}


def every(folder: Path, *, frames: int = 1000, kills: int = 4) -> Found:
    """Files of which every frame is wanted, and workers, registry and reader that are killed."""
    setting = Setting(folder, frames=frames, rate=None)
    with running(setting) as run:
        for number in range(kills):
            found = run.running(50 * (number + 1))
            victims = [found["workers"][0], found["registry"], found["readers"][0]]
            end_process(victims[number % 3]["pid"])
            name, again = victims[number % 3]["name"], victims[number % 3]["again"]
            run.wait_for(lambda now, n=name, a=again: _alive(now, n, a))
        summary = run.finish()
    return _result(setting, summary, frames)


FAULTS = {
    each.__name__: each
    for each in (workers, registry, readers, driver, hang, disk, camera, rolling, every)
}


def _result(setting: Setting, summary: Found, frames: int) -> Found:
    found = audit(setting.out, frames)
    return {
        "cameras": len(summary["streams"]),
        "frames_each": frames,
        "rate": setting.rate,
        "status": summary["status"],
        "code": summary["code"],
        "sound": found.sound,
        "audit": asdict(found),
        "fenced": sum(s["fenced"] for s in summary["streams"]),
        "repeats_refused": sum(s["repeated"] for s in summary["streams"]),
        "flushed": sum(w["flushed"] or 0 for w in summary["workers"]),
        "resumed": sum(w["resumed"] or 0 for w in summary["workers"]),
    }


def _back(run: Run, found: Found, names: list[str], moment: float) -> list[float]:
    """Seconds until each of some streams has a result under a later lease."""
    epochs = {s["name"]: s["epoch"] for s in found["streams"] if s["state"] == "running"}
    return [
        round(run.result_after(name, epochs[name], moment), 3) for name in names if name in epochs
    ]


def _next_result(run: Run, moment: float) -> float:
    """Seconds until any stream has a result that was not there half a second after a moment."""
    time.sleep(0.5)
    count, end = len(run.rows), time.monotonic() + 90
    while time.monotonic() < end:
        if len(run.rows) > count:
            return round(time.monotonic() - moment, 3)
        time.sleep(0.02)
    raise TimeoutError("no results any more")


def _spread_of(seconds: list[float]) -> Found:
    return {"seconds": seconds, "seconds_median": seconds[len(seconds) // 2] if seconds else None}


def _process(found: Found, name: str) -> Found:
    known = [found["registry"], *found["workers"], *found["readers"]]
    return next(each for each in known if each["name"] == name)


def _alive(found: Found, name: str, again: int) -> bool:
    """Whether a process is up that was started again since."""
    now = _process(found, name)
    return now["life"] == "up" and now["again"] > again


def _spread(found: Found) -> bool:
    return all(s["worker"] or s["state"] != "running" for s in found["streams"])


def _state(found: Found, name: str) -> str | None:
    return next((s["state"] for s in found["streams"] if s["name"] == name), None)


def _knows(found: Found, name: str) -> bool:
    return _state(found, name) is not None


def _exists(pid: int) -> bool:
    """Whether a process has not ended; one that is ending has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _said(run: Run, words: str, seconds: float) -> bool:
    """Whether the command says something on the terminal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if words in (run.setting.folder / "log.txt").read_text():
            return True
        time.sleep(0.1)
    return False


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
