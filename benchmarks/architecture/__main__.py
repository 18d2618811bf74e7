"""Draw docs/architecture.md: the packages, and one frame's way through the code, from a trace.

python -m benchmarks.architecture            # writes the page's tables and its pictures

With a CUDA device the device's way is traced there, and a step is replayed from CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.architecture import pages, pictures, tracing
from benchmarks.architecture.pages import PAGE, WAYS
from eventful.bench.plots import STYLE
from eventful.bench.results import origin
from eventful.bench.tables import put
from eventful.surgery.libraries import load

IMAGES = PAGE.parent / "images"


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    traces = {
        "host": tracing.steady_frame("host"),
        "device": tracing.steady_frame("device", device),
    }
    where = origin(device)
    machine = where["device_name"] if device == "cuda" else "the CPU, without CUDA graphs"
    put(PAGE, pages.packages_table(), "packages")
    put(PAGE, pages.upward_table(traces), "upward")
    origins = f"*The device's way traced on {machine}. Commit {where['commit'][:7]}.*"
    put(PAGE, f"{pages.numbers_table(traces)}\n\n{origins}", "numbers")
    for way in WAYS:
        put(PAGE, pages.tree(traces[way]), f"{way}-tree")
    matplotlib: Any = load("matplotlib")
    matplotlib.use("Agg")
    titles = {
        "host": "one frame on the host",
        "device": f"one frame on a device, traced on {machine}",
    }
    with matplotlib.rc_context(STYLE):
        pictures.draw_packages(IMAGES / "packages.png")
        for way in WAYS:
            path = IMAGES / f"frame-{way}.png"
            pictures.draw_frame(traces[way], pages.lanes(traces), titles[way], path)
    for way in WAYS:
        for line in pages.unexpected(traces[way]):
            print(f"{way}: a call upward that is not listed in CALLBACKS: {line}")


if __name__ == "__main__":
    main()
