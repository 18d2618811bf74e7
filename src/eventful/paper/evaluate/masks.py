"""Pictures of errors and update masks over time (Figure 10), and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.bench.results import origin
from eventful.errors import ConfigError
from eventful.models.vitdet.frames import Detections, Placement
from eventful.models.vitdet.model import ViTDet
from eventful.paper.data.problems import Problems
from eventful.paper.data.records import Box, Video
from eventful.paper.data.world import camera_of
from eventful.paper.evaluate import evaluation
from eventful.paper.evaluate.evaluation import NoProgress, Progress, Settings
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.report import Report, Row, table
from eventful.paper.evaluate.variants import Variant
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from eventful.surgery.libraries import load
from eventful.video.charts import spread, update_sheet
from eventful.video.overlay import UpdateView, paper_gate
from eventful.video.scene import UpdateStep, with_boxes

COLUMNS = 5
SHOWN = 3  # videos in the picture of all
SCORE = 0.5  # of the detections shown


@dataclass(frozen=True)
class _Watched:
    """One video: its steps for the picture, and a table row for each."""

    name: str
    steps: list[UpdateStep]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class MasksReport(Report):
    """Pictures and a table of where errors and updates lie.

    Attributes:
        steps: one entry per video and frame.
    """

    steps: tuple[dict[str, Any], ...] = ()
    watched: tuple[_Watched, ...] = ()
    gate: str = ""

    def tables(self) -> dict[str, str]:
        """See `Report`."""
        return {**super().tables(), "masks.csv": table(self.steps)}

    def draw(self, folder: Path) -> list[Path]:
        """A sheet for each video, and the first of them in one picture."""
        sheets = []
        for seen in self.watched:
            sheets.append(folder / f"sheet-{seen.name}.png")
            chosen = spread(seen.steps, COLUMNS)
            update_sheet(chosen, sheets[-1], gate=self.gate, prediction=f"{seen.name}, boxes")
        _stack(sheets[:SHOWN], folder / "figure.png")
        return [*sheets, folder / "figure.png"]


def draw_masks(
    experiment: Experiment, settings: Settings, progress: Progress | None = None
) -> MasksReport:
    """Run the only variant of an experiment over the videos and keep what its gate did."""
    data = evaluation.opened(experiment, settings, Problems())
    variants, left_out = evaluation.with_weights(experiment, settings)
    if len(variants) != 1 or variants[0].config() is None or variants[0].model != "vitdet":
        raise ConfigError(f"{experiment.name}: pictures of masks are of one eventful ViTDet.")
    (variant,), shown = variants, progress or NoProgress()
    model = evaluation.weights_of(variant, settings).vitdet(settings.device)
    frames = sum(min(len(video), settings.frames or len(video)) for video in data)
    shown.begin(variant, frames, len(data))
    watched, gate = [], ""
    for video in data:
        seen, gate = _watch(model, variant, video, settings.frames, data.classes, shown)
        watched.append(seen)
    rows = tuple(row for seen in watched for row in seen.rows)
    report = MasksReport(
        experiment,
        (Row.of(variant, videos=len(data), frames=frames),),
        evaluation.described(experiment, settings, data, variants),
        origin(settings.device),
        left_out,
        statistics=_statistics(rows),
        detail=_by_name(watched),
        steps=rows,
        watched=tuple(watched),
        gate=gate,
    )
    if settings.out is not None:
        report.write(settings.out)
    return report


def _watch(
    model: ViTDet,
    variant: Variant,
    video: Video,
    frames: int | None,
    classes: Sequence[str],
    progress: Progress,
) -> tuple[_Watched, str]:
    config = variant.config()
    assert config is not None
    stream = Stream(convert(model, config), maps=True)
    name, gate = camera_of(video) or video.name, ""
    seen = _Watched(name, [], [])
    for frame in islice(video, frames):
        pixels, placement = model.prepare(frame.pixels)
        (found,) = stream(pixels, [placement])
        record = stream.last
        assert record is not None
        gate = gate or paper_gate(record)
        picture = frame.pixels.float().cpu() / 255
        rows, columns = (-(-side // model.config.backbone.patch) for side in placement.content)
        view = UpdateView.of(picture[None], record, gate).cut(rows, columns)
        shown = with_boxes(picture, *_texts(found, classes))
        seen.steps.append(UpdateStep.of(frame.index, view, shown, record, gate))
        inside = _inside(frame.boxes, placement, (rows, columns), model.config.backbone.patch)
        flush = record.flushed[0]
        where = {"video": video.name, "camera": name, "frame": frame.index, "flush": int(flush)}
        seen.rows.append({**where, **_where(view, inside)})
        progress.advance(1)
    return seen, gate


def _texts(found: Detections, classes: Sequence[str]) -> tuple[Detections, list[str]]:
    kept = found[found.scores >= SCORE]
    return kept, [classes[label] for label in kept.labels.tolist()]


def _inside(
    boxes: Sequence[Box], placement: Placement, grid: tuple[int, int], patch: int
) -> Tensor:
    """Which tokens (h, w) an annotated object touches."""
    made = torch.zeros(grid, dtype=torch.bool)
    for box in boxes:
        corners = placement.into(torch.tensor([[box.x1, box.y1, box.x2, box.y2]]))[0] / patch
        left, top = (int(value) for value in corners[:2].floor())
        right, bottom = (int(value) for value in corners[2:].ceil())
        made[max(0, top) : bottom, max(0, left) : right] = True
    return made


def _where(view: UpdateView, inside: Tensor) -> dict[str, float | int | str]:
    """Means of the error, and shares of the picture and of the updates, in objects."""
    updated = int(view.mask.sum())
    return {
        "tokens": inside.numel(),
        "updated": updated,
        "objects": float(inside.float().mean()),
        "updated_in_objects": float(view.mask[inside].sum()) / updated if updated else "",
        "error_in_objects": _mean(view.error[inside]),
        "error_elsewhere": _mean(view.error[~inside]),
    }


def _mean(values: Tensor) -> float | str:
    return float(values.mean()) if len(values) else ""


def _statistics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over all frames that are no flush and show an object."""
    made = {}
    for name in ("objects", "updated_in_objects", "error_in_objects", "error_elsewhere"):
        values = [row[name] for row in rows if not row["flush"] and row[name] != ""]
        if values:
            made[name] = sum(values) / len(values)
    return made


def _by_name(watched: Sequence[_Watched]) -> dict[str, dict[str, float]]:
    """The same for each camera."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for seen in watched:
        rows.setdefault(seen.name, []).extend(seen.rows)
    return {name: _statistics(own) for name, own in rows.items()}


def _stack(sheets: Sequence[Path], path: Path) -> None:
    """One picture below the other."""
    pillow = load("PIL.Image")
    pictures = [pillow.open(sheet).convert("RGB") for sheet in sheets]
    width = max(picture.width for picture in pictures)
    whole = pillow.new("RGB", (width, sum(picture.height for picture in pictures)), "white")
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    whole.quantize(256).save(path, optimize=True)
