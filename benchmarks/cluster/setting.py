"""What the runs share: a video, a `sources.toml`, a process, and an audit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eventful.pipeline.results import LINES
from eventful.remote.ports import children
from eventful.video.sink import VideoSink

MODEL = "timm:test_vit"  # six small blocks, 24 tokens, random weights: processes are what is tried
PATIENCE = 180.0  # seconds for something that should happen at once


def video(path: Path, frames: int, size: tuple[int, int] = (64, 96)) -> Path:
    """A bright square that moves over noise that stands still."""
    torch.manual_seed(1)
    ground = torch.randint(60, 120, (3, *size), dtype=torch.uint8)
    with VideoSink(path, 25.0, 23, preset="veryfast") as sink:
        for t in range(frames):
            picture = ground.clone()
            left = t * 2 % (size[1] - 16)
            picture[:, 20:36, left : left + 16] = 230
            sink.write(picture)
    return path


@dataclass
class Setting:
    """A folder with a video and a plan.

    Attributes:
        frames: of the video; `rate` frames a second at which each camera reads it.
        cluster: further values of `[cluster]`.
        stream: further values of every `[[stream]]`.
    """

    folder: Path
    cameras: int = 6
    frames: int = 2000
    rate: float | None = 25.0
    cluster: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.out, self.plan = self.folder / "out", self.folder / "sources.toml"
        self.film = video(self.folder / "camera.mp4", self.frames)
        head = {"model": MODEL, "size": "64x96", "workers": 2, "deadline": 3.0, **self.cluster}
        lines = ["[cluster]", *(f"{name} = {_toml(value)}" for name, value in head.items())]
        self.plan.write_text("\n".join(lines) + "\n")
        for number in range(self.cameras):
            self.add(f"camera {number}")

    def add(self, name: str) -> None:
        """One more stream."""
        own = {"name": name, "source": str(self.film), **self.stream}
        if self.rate is not None:
            own |= {"mode": "latest", "rate": self.rate}
        lines = ["", "[[stream]]", *(f"{key} = {_toml(value)}" for key, value in own.items())]
        with self.plan.open("a") as file:
            file.write("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    return json.dumps(value)


class Run:
    """A process of `eventful cluster run`, watched from outside.

    Attributes:
        rows: of the results, with the moment at which each was seen.
    """

    def __init__(self, setting: Setting, *options: str) -> None:
        self.setting = setting
        self.log = (setting.folder / "log.txt").open("a")
        command = [sys.executable, "-m", "eventful.cli", "cluster", "run", str(setting.plan)]
        command += ["--out", str(setting.out), *options]
        # A session of its own: ctrl-C of a terminal is not for it.
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.rows: list[tuple[float, dict[str, Any]]] = []
        self._offset, self._ended = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """What the run says of itself."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.setting.out / "state/status.json").read_text())
            if found["pid"] == self.process.pid:
                return found
        return {}

    def wait_for(self, what: Any, seconds: float = PATIENCE) -> dict[str, Any]:
        """The first status for which something holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.status()
            if found and what(found):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise TimeoutError(f"it did not happen; {self.setting.folder / 'log.txt'}")

    def running(self, frames: int = 0) -> dict[str, Any]:
        """A status in which every worker is up and every camera has so many results."""
        return self.wait_for(
            lambda found: (
                all(w["life"] == "up" for w in found["workers"])
                and len(found["streams"]) >= self.setting.cameras
                and all(s["counted"] >= frames or s["state"] != "running" for s in found["streams"])
            )
        )

    def result_after(
        self, stream: str, epoch: int, moment: float, seconds: float = PATIENCE
    ) -> float:
        """Seconds from a moment to the next result of a stream under a later lease."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                recent = self.rows[-5000:]
            for seen, row in recent:
                if row["source"] == stream and seen > moment and row["epoch"] > epoch:
                    return seen - moment
            time.sleep(0.02)
        raise TimeoutError(f"{stream} did not come back")

    def finish(self, seconds: float = 600) -> dict[str, Any]:
        """Wait for its end; what `cluster.json` says."""
        code = self.process.wait(seconds)
        self._ended = True
        self._thread.join()
        self.log.close()
        found: dict[str, Any] = json.loads((self.setting.out / "cluster.json").read_text())
        return {**found, "code": code}

    def kill(self) -> None:
        """End everything at once, as a power cut does to a process."""
        below = children(self.process.pid)
        self.process.kill()
        self.process.wait()
        self._ended = True
        self._thread.join()
        self.log.close()
        self.left = below

    def _follow(self) -> None:
        while True:
            ended = self._ended
            self._read()
            if ended:
                return
            time.sleep(0.02)

    def _read(self) -> None:
        path = self.setting.out / LINES
        if not path.is_file():
            return
        now = time.monotonic()
        with path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        found = [(now, json.loads(line)) for line in whole.splitlines()] if whole else []
        self._offset += len(whole) + 1 if whole else 0
        with self._lock:
            self.rows += [(seen, _short(row)) for seen, row in found]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("source", "frame", "epoch")}


@contextmanager
def running(setting: Setting, *options: str) -> Iterator[Run]:
    """A run that is not left behind, whatever happens."""
    run = Run(setting, *options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(40)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()


@dataclass(frozen=True)
class Audit:
    """What the results say, read anew and from nothing else.

    Attributes:
        frames: that the cameras sent, by their last numbers.
        repeated: frames that are counted more than once, or both counted and missed.
        unexplained: frames that are neither counted nor named as missed.
        missed: by reason; `reported` the same as the run itself says.
    """

    frames: int
    counted: int
    missed: dict[str, int]
    repeated: int
    unexplained: int
    reported: dict[str, int]

    @property
    def sound(self) -> bool:
        """Nothing is counted twice, and the gaps are those reported."""
        same = {"counted": self.counted, **self.missed} == self.reported
        return same and not self.repeated and not self.unexplained


def audit(out: Path, frames: int | None = None) -> Audit:
    """Read all results of a run.

    Args:
        frames: of each camera; None for up to the position that the run reports.
    """
    summary = json.loads((out / "cluster.json").read_text())
    counted: dict[str, list[int]] = {}
    missed: dict[str, list[int]] = {}
    reasons: dict[str, int] = {"dropped": 0, "lost": 0, "disk full": 0}
    with (out / LINES).open() as file:
        for line in file:
            row = json.loads(line)
            own = missed.setdefault(row["source"], [])
            for each in row["missed"]:
                own += range(each["first"], each["last"] + 1)
                reasons[each["reason"]] += each["last"] - each["first"] + 1
            if "labels" in row:
                counted.setdefault(row["source"], []).append(row["frame"])
    total = repeated = unexplained = 0
    for stream in summary["streams"]:
        name = stream["name"]
        length = stream["position"] + 1 if frames is None else frames
        both = counted.get(name, []) + missed.get(name, [])
        total += length
        repeated += len(both) - len(set(both))
        unexplained += len(set(range(length)) ^ set(both))
    return Audit(
        total,
        sum(map(len, counted.values())),
        reasons,
        repeated,
        unexplained,
        dict(summary["frames"]),
    )


def end_process(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; the moment."""
    os.kill(pid, number)
    return time.monotonic()
