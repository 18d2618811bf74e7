"""What `eventful demo` makes: a model dense and eventful on one video, side by side."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from torch import Tensor

from eventful import files
from eventful.pipeline.history import FrameRow
from eventful.pipeline.loop import RunResult, run
from eventful.pipeline.outputs import Observer
from eventful.pipeline.panels import Found, Panels, PanelStep
from eventful.pipeline.pictures import to_image
from eventful.pipeline.predictions import Prediction
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.stepping import Stepped
from eventful.pipeline.stopping import Stop
from eventful.surgery.libraries import load
from eventful.video.sink import VideoSink

VIDEO, PICTURE = "side-by-side.mp4", "side-by-side.png"
FRAMES = 60  # of 96 in the clip of the package: both models take less than a minute
_RATE = 12.0  # frames a second of the video, slow enough to see what is computed


def clip() -> tuple[Path, Path]:
    """The clip that comes with the package, and its labels."""
    folder = Path(str(resources.files("eventful.pipeline") / "clips"))
    return folder / "street.mp4", folder / "street.json"


def show(
    model: str,
    video: str | None,
    settings: RunSettings,
    names: tuple[str, ...] = (),
    *,
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Run both models on a video, by default the package's own, and film them side by side.

    Args:
        settings: `compare` and `report` are on, `video` off.
        names: of the classes.
    """
    load("av")  # before any work is done
    source, labels = clip()
    if video is None:
        video, settings = str(source), replace(settings, labels=labels)
    filmed = Filmed(settings.out, names, settings.frames, observer or Observer())
    try:
        return run(model, [video], settings, observer=filmed, stop=stop)
    finally:
        filmed.close()


class Filmed(Observer):
    """Films a run: each step is a picture of panels. Passes everything on to another observer."""

    def __init__(
        self, folder: Path, names: tuple[str, ...], frames: int | None, other: Observer
    ) -> None:
        self._folder, self._names, self._other = folder, names, other
        self._frames = frames
        self._panels: Panels | None = None
        self._sink: VideoSink | None = None
        self._steps = 0
        self._best: tuple[float, Tensor] | None = None

    def began(self, source: str, total: int | None, done: int) -> None:
        """See `Observer`."""
        self._frames = total or self._frames
        self._other.began(source, total, done)

    def stepped(self, row: FrameRow, frames: int) -> None:
        """See `Observer`."""
        self._other.stepped(row, frames)

    def noted(self, source: str, message: str) -> None:
        """See `Observer`."""
        self._other.noted(source, message)

    def ended(self, source: str, status: str, message: str) -> None:
        """See `Observer`."""
        self._other.ended(source, status, message)

    def saw(self, row: FrameRow, picture: Tensor, stepped: Stepped, updated: Tensor | None) -> None:
        """Add a picture to the film, and keep the one that shows most."""
        if self._panels is None:
            self._panels = Panels(self._names, frames=self._frames)
            self._sink = VideoSink(self._folder / VIDEO, _RATE, preset="veryfast").__enter__()
        step = PanelStep(
            picture, row.updated / max(row.tokens, 1), row.ms,
            dense=_found(stepped.dense), eventful=_found(stepped.prediction), updated=updated,
            dense_ms=row.dense_ms, flushed=row.flushed,
        )  # fmt: skip
        made = self._panels.add(step)
        assert self._sink is not None
        self._sink.write(made)
        self._steps += 1
        # Many boxes, and late, so that the plots are filled; not a flush.
        worth = (row.found or 0) + 0.1 * self._steps - 1e6 * row.flushed
        if self._best is None or worth > self._best[0]:
            self._best = worth, made

    def close(self) -> None:
        """End the video, and write the picture."""
        if self._sink is not None:
            self._sink.__exit__(None, None, None)
        if self._best is not None:
            with files.replacing(self._folder / PICTURE) as partial:
                # 256 colours take a third of the bytes, and the difference is hard to see.
                to_image(self._best[1]).quantize(256).save(partial, format="PNG", optimize=True)


def _found(prediction: Prediction | None) -> Found | None:
    if prediction is None or prediction.detections is None:
        return None
    found = prediction.detections
    return Found(found.boxes, found.labels, found.scores)
