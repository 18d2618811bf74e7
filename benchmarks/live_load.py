"""Load of `eventful live`: eight sources at ten frames a second through a small model.

    python -m benchmarks.live_load --minutes 10

Starts the command in a process of its own, watches it as two viewers do, a fast and a slow one, and
stores memory, latency and drops in benchmarks/results/live-load.json. --table writes the table of
docs/live.md from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, quantiles
from typing import Any
from urllib.request import urlopen

import torch

from eventful import files
from eventful.bench.results import origin
from eventful.bench.tables import put
from eventful.video.sink import VideoSink
from eventful.video.synthetic import moving_objects

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "live-load.json", ROOT / "docs" / "live.md"
SOURCES, RATE, FRAMES, SIDE = 8, 10, 300, 128
MODEL, THREADS = "timm:vit_tiny_patch16_224", 1
EVERY = 2.0  # seconds between two looks at the process
WARM = 0.2  # share of the time before memory is compared
SLOW = 2.0  # seconds that the slow viewer takes for a picture


@dataclass
class Watched:
    """What a viewer saw.

    Attributes:
        latencies: milliseconds from the arrival of each frame to its result.
        behind: of the slow viewer's pictures, how many steps were done since each was made.
    """

    latencies: list[float] = field(default_factory=list)
    pictures: int = 0
    behind: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if not given.table:
        files.write_json(given.out, measure(given.minutes), indent=2)
    result = json.loads(given.out.read_text())
    if given.out == RESULTS:
        put(PAGE, table(result), "load")
    print(json.dumps(result, indent=2))


def measure(minutes: float) -> dict[str, Any]:
    """Run the page for some minutes under load."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [_video(Path(folder) / f"camera-{i}.mp4", i) for i in range(SOURCES)]
        with _page(sources) as url:
            return _watched(url, minutes)


def _video(path: Path, seed: int) -> Path:
    """A video of objects that move, with noise as of a camera."""
    with VideoSink(path, RATE) as sink:
        for frame in moving_objects(FRAMES, (SIDE, SIDE), objects=2, noise=0.01, seed=seed):
            sink.write((frame[0] * 255).round().to(torch.uint8))
    return path


@contextmanager
def _page(sources: list[Path]) -> Iterator[str]:
    command = [sys.executable, "-m", "eventful.cli", "live", *map(str, sources), "--loop", "--json"]
    command += ["--model", MODEL, "--size", str(SIDE), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "EVENTFUL_TOKEN": ""}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _watched(url: str, minutes: float) -> dict[str, Any]:
    stop = threading.Event()
    seen = {"fast": Watched(), "slow": Watched()}
    threads = [
        threading.Thread(target=_view, args=(url, seen[name], pause, stop), daemon=True)
        for name, pause in (("fast", 0.0), ("slow", SLOW))
    ]
    for thread in threads:
        thread.start()
    end, memory = time.monotonic() + 60 * minutes, []
    while time.monotonic() < end:
        time.sleep(EVERY)
        memory.append(_number(_read(url, "metrics"), "process_resident_memory_bytes") / 1e6)
    state = json.loads(_read(url, "api/state"))
    stop.set()
    for thread in threads:
        thread.join(10)
    return _result(minutes, memory, seen, state)


def _view(url: str, seen: Watched, pause: float, stop: threading.Event) -> None:
    """Watch the page as a browser does, and confirm each picture after a pause."""
    from websockets.sync.client import connect

    with connect(f"{url.replace('http', 'ws')}ws", max_size=None) as socket:
        while not stop.is_set():
            try:
                message = socket.recv(timeout=1)
            except TimeoutError:
                continue
            if isinstance(message, str):
                socket.send(json.dumps({"type": "seen", "state": True}))
                for source in json.loads(message)["sources"]:
                    seen.latencies += [point[4] for point in source["points"]]
                continue
            length = int.from_bytes(message[:4], "big")
            header = json.loads(message[4 : 4 + length])
            seen.pictures += 1
            if pause:
                now = json.loads(_read(url, "api/state"))["sources"]
                steps = next(source["steps"] for source in now if source["id"] == header["source"])
                seen.behind.append(steps - header["number"])
            stop.wait(pause)
            socket.send(json.dumps({"type": "seen", "source": header["source"]}))


def _result(
    minutes: float, memory: list[float], seen: dict[str, Watched], state: dict[str, Any]
) -> dict[str, Any]:
    warm = memory[int(WARM * len(memory)) :]
    part = max(1, len(warm) // 4)
    sources, latencies = state["sources"], seen["fast"].latencies
    frames = sum(source["frames"] for source in sources)
    dropped, steps = (sum(source[name] for source in sources) for name in ("dropped", "steps"))
    cuts = quantiles(latencies, n=100)
    return {
        "minutes": minutes,
        "sources": len(sources),
        "rate": RATE,
        "model": f"{MODEL}, {SIDE} x {SIDE}",
        "frames": frames,
        "steps": steps,
        "dropped": dropped,
        "not_counted": frames - steps - dropped,  # at work or waiting when it was read
        "steps_a_second": round(steps / (60 * minutes), 2),
        "tokens": round(mean(s["updated"] / s["tokens"] for s in sources), 4),
        "memory_mb": {
            "first_quarter": round(mean(warm[:part]), 1),
            "last_quarter": round(mean(warm[-part:]), 1),
            "highest": round(max(memory), 1),
        },
        "latency_ms": {
            "p50": round(cuts[49], 1),
            "p95": round(cuts[94], 1),
            "p99": round(cuts[98], 1),
            "highest": round(max(latencies), 1),
        },
        "viewers": {name: {"pictures": one.pictures} for name, one in seen.items()},
        "slow_viewer": {"seconds_a_picture": SLOW, "most_steps_behind": max(seen["slow"].behind)},
        "states": sorted({source["status"] for source in sources}),
        "origin": {
            **origin("cpu"),
            "threads": str(THREADS),
            "cores": os.cpu_count(),
            **{name: version(name) for name in ("fastapi", "uvicorn", "websockets")},
        },
    }


def table(result: dict[str, Any]) -> str:
    """A result as a table of the documentation."""
    memory, latency, where = (result[name] for name in ("memory_mb", "latency_ms", "origin"))
    rows = {
        "frames that came, computed, dropped": f"{result['frames']:,}, {result['steps']:,}, "
        f"{result['dropped']:,}",
        "frames computed a second, of all sources": f"{result['steps_a_second']:.0f}",
        "memory of the process after warm-up, at the end": f"{memory['first_quarter']:.0f} MB, "
        f"{memory['last_quarter']:.0f} MB",
        "latency: median, 95 %, 99 %, highest": ", ".join(
            f"{latency[name]:.0f}" for name in ("p50", "p95", "p99", "highest")
        )
        + " ms",
        "pictures of a fast and a slow viewer": f"{result['viewers']['fast']['pictures']:,}, "
        f"{result['viewers']['slow']['pictures']:,}",
    }
    lines = ["| | |", "|---|--:|", *(f"| {name} | {text} |" for name, text in rows.items())]
    about = (
        f"*{result['sources']} videos at {result['rate']} frames a second through "
        f"`{result['model']}` for {result['minutes']:g} minutes, with two viewers. "
        f"{where['device_name']}, {where['cores']} cores shared with other work, "
        f"{where['threads']} thread, torch {where['torch']}, commit {where['commit'][:7]}: "
        "[benchmarks/results/live-load.json](../benchmarks/results/live-load.json).*"
    )
    return "\n".join([*lines, "", about])


def _read(url: str, path: str) -> str:
    with urlopen(f"{url}{path}", timeout=30) as answer:
        content: bytes = answer.read()
    return content.decode()


def _number(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


if __name__ == "__main__":
    main()
