"""A long run whose memory is watched, and how frames a second grow with workers."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.setting import Setting, audit, end_process, running
from eventful.cluster.accounts import Entry, Part
from eventful.cluster.registry import Registry
from eventful.remote.ports import children

Found = dict[str, Any]


def soak(folder: Path, *, seconds: float = 660.0, kill_every: float = 150.0) -> Found:
    """Cameras for eleven minutes, and a worker that is killed now and then."""
    setting = Setting(folder, cameras=4, frames=500, rate=15.0, stream={"loop": True})
    samples: list[Found] = []
    kills = 0
    random.seed(5)
    with running(setting) as run:
        run.running(20)
        began = time.monotonic()
        next_kill = began + kill_every
        while (now := time.monotonic()) - began < seconds:
            found = run.status()
            if found:
                samples.append(_sample(run.process.pid, found, now - began))
            if now > next_kill:
                end_process(random.choice(found["workers"])["pid"])
                kills, next_kill = kills + 1, now + kill_every
            time.sleep(10)
        run.process.send_signal(signal.SIGINT)
        summary = run.finish(90)
    sound = audit(setting.out)
    return {
        "cameras": 4,
        "seconds": round(seconds),
        "status": summary["status"],
        "sound": sound.sound,
        "audit": asdict(sound),
        "kills": kills,
        "state_kilobytes": sum(
            p.stat().st_size for p in (setting.out / "state").rglob("*") if p.is_file()
        )
        // 1000,
        "samples": samples,
    }


def scaling(folder: Path, *, seconds: float = 30.0) -> Found:
    """Frames a second with one worker and with two, of eight files of which every frame counts."""
    rows = []
    for workers in (1, 2):
        setting = Setting(
            folder / str(workers), cameras=8, frames=20_000, rate=None, cluster={"workers": workers}
        )
        with running(setting) as run:
            run.running(100)  # first steps and measurements are behind it
            before, began = _counted(run.status()), time.monotonic()
            time.sleep(seconds)
            after, took = _counted(run.status()), time.monotonic() - began
            found = run.status()
            run.process.send_signal(signal.SIGINT)
            summary = run.finish(90)
        costs = [s["cost_ms"] for s in found["streams"] if s["cost_ms"]]
        rows.append(
            {
                "workers": workers,
                "fps": round((after - before) / took, 1),
                "cost_ms_median": sorted(costs)[len(costs) // 2] if costs else None,
                "sound": audit(setting.out).sound,
                "status": summary["status"],
            }
        )
    return {"streams": 8, "seconds": seconds, "rows": rows}


def counting(folder: Path, *, seconds: float = 10.0) -> Found:
    """Results a second that one registry counts, writes and delivers: 16 workers of 20 streams."""
    folder.mkdir(exist_ok=True)
    registry = Registry(str(folder), str(folder), "jsonl", 100_000)
    box = {"box": [10.5, 20.5, 30.5, 40.5], "label": "person", "class": 0, "score": 0.75}
    row = {"seconds": 1.0, "detections": [{**box, "track": None}] * 5}
    end = time.monotonic() + seconds

    def work(worker: int) -> None:
        names = [f"{worker}-{i}" for i in range(20)]
        for name in names:
            registry.add(name, name, False)
        leases = {name: registry.lease(name, f"w{worker}", "r0") for name in names}
        number = 0
        while time.monotonic() < end:
            part = (Part(number, number),)
            entries = [Entry(name, leases[name].epoch, part, row) for name in names]
            registry.commit(entries)
            number += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    found = registry.describe()
    registry.close()
    counted = sum(account["counted"] for account in found["accounts"])
    return {
        "workers": 16,
        "streams": 320,
        "counted": counted,
        "waiting_at_the_end": found["waiting"],
        "per_second": round((counted - found["waiting"]) / took),
    }


LONG = {each.__name__: each for each in (soak, scaling, counting)}


def _counted(found: Found) -> int:
    return sum(s["counted"] for s in found["streams"])


def _sample(pid: int, found: Found, seconds: float) -> Found:
    """Resident megabytes of each kind of process."""
    kinds = {"driver": [pid], "registry": [found["registry"]["pid"]]}
    kinds["readers"] = [r["pid"] for r in found["readers"]]
    kinds["workers"] = [w["pid"] for w in found["workers"]]
    known = {each for own in kinds.values() for each in own}
    kinds["ray"] = [each for each in children(pid) if each not in known]
    return {
        "seconds": round(seconds),
        "counted": _counted(found),
        **{kind: round(sum(map(_resident, own)) / 1e6) for kind, own in kinds.items()},
    }


def _resident(pid: int | None) -> int:
    """Bytes that a process holds for itself: Ray's shared memory is not counted."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * 4096
