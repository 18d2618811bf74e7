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

import numpy as np
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
EVERY = 0.5  # seconds between two looks at the process
BLOCK = 10.0  # seconds of which one number of each kind of memory is kept
WARM = 20.0  # seconds before memory is compared, at most half of the time
SLOW = 2.0  # seconds that the slow viewer takes for a picture


MEMORY = {
    "resident": "process_resident_memory_bytes",
    "allocated": "eventful_live_allocated_bytes",
}


@dataclass(frozen=True)
class Memory:
    """Megabytes of the process at a moment, and what of them the program uses."""

    seconds: float
    resident: float
    allocated: float


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
        process.wait(120)


def _watched(url: str, minutes: float) -> dict[str, Any]:
    stop = threading.Event()
    seen = {"fast": Watched(), "slow": Watched()}
    threads = [
        threading.Thread(target=_view, args=(url, seen[name], pause, stop), daemon=True)
        for name, pause in (("fast", 0.0), ("slow", SLOW))
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    memory: list[Memory] = []
    while (now := time.monotonic() - began) < 60 * minutes:
        text = _read(url, "metrics")
        sizes = [_number(text, name) / 1e6 for name in MEMORY.values()]
        memory.append(Memory(now, *sizes))
        time.sleep(EVERY)
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
    minutes: float, memory: list[Memory], seen: dict[str, Watched], state: dict[str, Any]
) -> dict[str, Any]:
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
        "fewest_steps": min(source["steps"] for source in sources),
        "dropped": dropped,
        "not_counted": frames - steps - dropped,  # at work or waiting when it was read
        "steps_a_second": round(steps / (60 * minutes), 2),
        "tokens": round(mean(s["updated"] / s["tokens"] for s in sources), 4),
        "memory_mb": {name: _memory(memory, name, minutes) for name in MEMORY},
        "latency_ms": {
            "mean": round(mean(latencies), 1),
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


def _memory(seen: list[Memory], name: str, minutes: float) -> dict[str, Any]:
    """One kind of memory in blocks of time, and how it grows once the page is warm.

    A block counts with its lower quartile: tensors of a step come and go. The standard error is
    that of a straight line through the blocks.
    """
    blocks: dict[int, list[float]] = {}
    for one in seen:
        blocks.setdefault(int(one.seconds / BLOCK), []).append(getattr(one, name))
    series = [float(np.percentile(values, 25)) for values in blocks.values()]
    warm = min(round(WARM / BLOCK), len(series) // 2)
    return {
        "series": [round(value, 1) for value in series],
        "seconds_a_value": BLOCK,
        "highest": round(max(getattr(one, name) for one in seen), 1),
        "warm": _growth(series[warm:]),
        "second_half": _growth(series[len(series) // 2 :]),
    }


def _growth(series: list[float]) -> dict[str, float]:
    """Megabytes a minute, with the standard error."""
    minutes = BLOCK / 60 * np.arange(len(series))
    slope, level = np.polyfit(minutes, series, 1)
    rest = np.asarray(series) - level - slope * minutes
    spread = float(np.sqrt(rest @ rest / max(len(series) - 2, 1)))
    error = spread / float(np.sqrt(((minutes - minutes.mean()) ** 2).sum()))
    return {"mb_a_minute": round(float(slope), 2), "standard_error": round(error, 2)}


def table(result: dict[str, Any]) -> str:
    """A result as a table of the documentation."""
    latency, where = result["latency_ms"], result["origin"]
    resident, allocated = (result["memory_mb"][name] for name in MEMORY)
    grown = allocated["second_half"]
    rows = {
        "frames that came, computed, dropped": f"{result['frames']:,}, {result['steps']:,}, "
        f"{result['dropped']:,}",
        "frames computed a second, of all sources": f"{result['steps_a_second']:.0f}",
        "memory of the process after 1, 5 and 10 minutes": ", ".join(
            f"{resident['series'][place]:.0f}" for place in (6, 30, -1)
        )
        + " MB",
        "of which the program uses": ", ".join(
            f"{allocated['series'][place]:.0f}" for place in (6, 30, -1)
        )
        + " MB",
        "growth of that in the second half": f"{grown['mb_a_minute']:.1f} ± "
        f"{grown['standard_error']:.1f} MB a minute",
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
