"""The report of an evaluation: measured and published numbers as JSON, CSV and a figure."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from eventful import files
from eventful.cost.units import unit_of
from eventful.errors import MissingDependencyError
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.variants import Variant

UNITS = {"vitdet": "GFlops per frame", "vivit": "TFlops per video"}  # of `Row.operations`
_FLOPS = {"vitdet": 1e9, "vivit": 1e12}
METRICS = {
    "coco_map50": "mAP50, COCO",
    "fgfa_map50": "mAP50, FGFA",
    "top1": "top-1",
    "top5": "top-5",
}
_FROM_VARIANT = (
    *("label", "preset", "model", "size", "r", "fraction", "h", "per_gate", "tuned_r", "share"),
)


@dataclass(frozen=True)
class Scale:
    """The unit in which a table or a figure shows operations.

    Attributes:
        name: heading, such as MFlops per frame.
        factor: from `Row.operations` to the unit.
        digits: behind the point, for a table.
    """

    name: str
    factor: float
    digits: int

    @classmethod
    def of(cls, model: str, rows: Sequence[Row]) -> Scale:
        """The unit of the paper, or a smaller one where all rows are small.

        Beside published numbers the unit is the paper's. There are as many digits as the smallest
        number needs to be told from zero.
        """
        usual = 1 if model == "vitdet" else 3
        found = [n for row in rows for n in (row.operations, row.dense_operations) if n]
        if not found or any(row.published_operations for row in rows):
            return cls(UNITS[model], 1.0, usual)
        flops = _FLOPS[model]
        unit = unit_of(min(max(found) * flops, flops))
        factor = flops / unit.size
        least = math.floor(math.log10(min(found) * factor))
        digits = max(usual if factor == 1 else 1, 1 - least)
        return cls(UNITS[model].replace(UNITS[model].split()[0], unit.name), factor, digits)


@dataclass(frozen=True)
class Row:
    """One variant, measured. Accuracies are in percent; None where a number has no meaning.

    Attributes:
        operations: GFlops per frame of a detector, TFlops per video of a recogniser.
        dense_operations: of the model as it is, without pooling.
        share: of the frames computed, when skipping.
        ms: milliseconds of the transformer, per frame after the first (ViTDet) or per video.
        total_ms: the same for the whole model.
        pipelined_ms: the same, a frame, with frames queued; on a GPU alone.
        pipelined_speedup: the same ratio as `total_speedup`, of those.
        first_ms: of a video's first frame, which is a flush.
        first_total_ms: the same for the whole model.
        speedup: of the transformer, against the fastest dense path in the same run.
        total_speedup: the same for the whole model.
        base_speedup: of the transformer, against the model as the paper ran it.
        videos: that were used; those damaged or missing are not.
        skipped_videos: that could not be used.
    """

    key: str
    label: str
    preset: str
    model: str
    size: int | None
    r: int | None = None
    fraction: float | None = None
    h: float | None = None
    per_gate: float | None = None
    tuned_r: int | None = None
    share: float | None = None
    coco_map50: float | None = None
    fgfa_map50: float | None = None
    top1: float | None = None
    top5: float | None = None
    operations: float | None = None
    dense_operations: float | None = None
    ms: float | None = None
    total_ms: float | None = None
    first_ms: float | None = None
    first_total_ms: float | None = None
    speedup: float | None = None
    total_speedup: float | None = None
    base_speedup: float | None = None
    pipelined_ms: float | None = None
    pipelined_speedup: float | None = None
    videos: int | None = None
    frames: int | None = None
    skipped_videos: int = 0
    published_accuracy: float | None = None
    published_operations: float | None = None
    published_gpu_ms: float | None = None
    published_cpu_ms: float | None = None
    remark: str = ""

    @classmethod
    def of(cls, variant: Variant, **measured: Any) -> Row:
        """The row of a variant; `measured` may hold more than a row does."""
        names = {f.name for f in fields(cls)}
        own = {"key": variant.key, "remark": variant.remark}
        for name in _FROM_VARIANT:
            own[name] = getattr(variant, name)
        printed = {f"published_{k}": v for k, v in asdict(variant.published).items()}
        return cls(**{**own, **printed, **{k: v for k, v in measured.items() if k in names}})

    @property
    def saving(self) -> float | None:
        """Dense operations divided by the variant's."""
        if not self.operations or not self.dense_operations:
            return None
        return self.dense_operations / self.operations


@dataclass(frozen=True)
class Report:
    """An experiment, measured.

    Attributes:
        left_out: variants that could not be run, and why.
        problems: videos that could not be read, and why.
        statistics: numbers about the whole set, such as its padding.
        detail: per variant, further values of the metrics.
        groups: rows of the videos of each camera alone, for generated videos.
    """

    experiment: Experiment
    rows: tuple[Row, ...]
    settings: dict[str, Any]
    origin: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, tuple[Row, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = self.experiment
        return {
            "experiment": made.name,
            "title": made.title,
            "paper": made.paper,
            "kind": made.kind,
            "metric": made.metric,
            "unit": UNITS[made.model],
            "rows": [asdict(row) for row in self.rows],
            "groups": {name: [asdict(row) for row in rows] for name, rows in self.groups.items()},
            "statistics": self.statistics,
            "left_out": self.left_out,
            "problems": self.problems,
            "remark": made.remark,
            "detail": self.detail,
            "settings": self.settings,
            "origin": self.origin,
        }

    def write(self, folder: Path, *, draw: bool = True) -> list[Path]:
        """Write `results.json`, the tables and, where there is something to draw, the figures."""
        written = [folder / "results.json", *(folder / name for name in self.tables())]
        files.write_json(written[0], self.to_dict(), indent=2, durable=True)
        for name, text in self.tables().items():
            files.write_bytes(folder / name, text.encode(), durable=True)
        if not draw:
            return written
        try:
            return written + self.draw(folder)
        except MissingDependencyError as error:  # the numbers took long; keep them
            warnings.warn(f"No figures in {folder}: {error}", stacklevel=2)
            return written

    def tables(self) -> dict[str, str]:
        """CSV by file name."""
        made = {"results.csv": self.csv()}
        if self.groups:
            rows = [(name, row) for name, rows in self.groups.items() for row in rows]
            made["groups.csv"] = table([{"camera": n, **asdict(r), **self.origin} for n, r in rows])
        return made

    def draw(self, folder: Path) -> list[Path]:
        """Write the figures of this kind of experiment."""
        if self.experiment.kind != "accuracy":
            return []
        from eventful.paper.evaluate.figure import draw_groups, draw_tradeoff

        written = draw_tradeoff(self, folder / "figure.png")
        if len(self.groups) > 1:
            written += draw_groups(self, folder / "groups.png")
        return written

    def csv(self) -> str:
        """The rows with their origin: device, versions and commit."""
        columns = [f.name for f in fields(Row)]
        return table([{**asdict(row), **self.origin} for row in self.rows], columns)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV.

    Args:
        columns: of a table without rows.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
