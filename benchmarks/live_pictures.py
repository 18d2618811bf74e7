"""Pictures of the page of `eventful live` for docs/live.md, taken in Chromium.

    python -m benchmarks.live_pictures

A picture shows what the page shows on this machine at that moment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eventful.pipeline.demo import clip
from eventful.video.sink import VideoSink
from eventful.video.source import VideoFile
from eventful.video.world import World

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
DEAD = "rtsp://127.0.0.1:9/stream"  # a port that nobody listens on
# Name, colours, width, height, overlay, number of sources.
PICTURES = (
    ("live-light", "light", 1200, 800, "mask", 2),
    ("live-dark", "dark", 1200, 800, "error", 3),
    ("live-phone", "light", 390, 1500, "mask", 3),
)
RATE = 4  # frames a second, which the detector can follow on two cores
SETTLED = 40.0  # seconds until the plots are filled


def main() -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        videos = {
            "street.mp4": VideoFile(clip()[0]),
            "corner.mp4": World(7, 60, "stand", exposures=1),
        }
        for name, frames in videos.items():
            with VideoSink(Path(folder) / name, RATE) as sink:
                for frame in frames:
                    sink.write(frame)
        command = [
            sys.executable,
            "-m",
            "eventful.cli",
            "live",
            "street.mp4",
            "corner.mp4",
            "--loop",
        ]
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", "--allow-url", DEAD, "--allow-folder", folder],
            stdout=subprocess.PIPE, text=True, cwd=folder, env={**os.environ, "EVENTFUL_TOKEN": ""},
        )  # fmt: skip
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        try:
            with sync_playwright() as start:
                browser = start.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                for name, scheme, width, height, overlay, sources in PICTURES:
                    scale = 2 if width < 500 else 1
                    context = browser.new_context(
                        viewport={"width": width, "height": height},
                        color_scheme=scheme,
                        device_scale_factor=scale,
                    )
                    page = context.new_page()
                    page.goto(url)
                    page.locator("canvas[data-number]").nth(1).wait_for()
                    if page.locator(".tile").count() < sources:
                        page.fill("#source", DEAD)
                        page.click("#add button[type=submit]")
                        page.locator('.badge[data-state="dead"]').wait_for()
                    page.check(f"input[name=overlay][value={overlay}]")
                    time.sleep(SETTLED if name == "live-light" else 5)
                    path = IMAGES / f"{name}.png"
                    page.screenshot(path=path, full_page=width > 500)
                    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
                    context.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


if __name__ == "__main__":
    main()
