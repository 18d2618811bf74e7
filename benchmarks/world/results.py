"""Stored results, and what can be read from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FEW = 500  # frames


@dataclass(frozen=True)
class Results:
    """One experiment's `results.json`."""

    data: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results | None:
        """What is stored in a folder; None if nothing is."""
        path = folder / "results.json"
        return cls(json.loads(path.read_text())) if path.is_file() else None

    @property
    def metric(self) -> str:
        """The accuracy that is shown."""
        return self.data["metric"]

    @property
    def rows(self) -> list[Row]:
        """All variants."""
        return self.data["rows"]

    @property
    def groups(self) -> dict[str, list[Row]]:
        """Rows by camera."""
        return self.data["groups"]

    @property
    def dense(self) -> Row:
        """The base model."""
        return next(row for row in self.rows if row["label"] == "Base model")

    def of(self, label: str, tuned_r: int | None = None) -> list[Row]:
        """The rows of a label, in the order they were measured."""
        return [r for r in self.rows if r["label"] == label and r["tuned_r"] == tuned_r]

    def one(self, label: str, **wanted: Any) -> Row:
        """The only row of a label with these values."""
        return only(self.rows, label, **wanted)

    def accuracy(self, row: Row) -> float:
        """In percent."""
        return row[self.metric]

    def loss(self, row: Row) -> float:
        """Points below the base model."""
        return self.accuracy(self.dense) - self.accuracy(row)

    def at_cost(self, rows: Iterable[Row], operations: float) -> float | None:
        """Accuracy of a line at this cost, between its points and the base model.

        None if the line does not reach so low.
        """
        points = sorted((r["operations"], self.accuracy(r)) for r in (*rows, self.dense))
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x0 <= operations <= x1:
                return y0 + (y1 - y0) * (operations - x0) / max(x1 - x0, 1e-12)
        return None

    @property
    def about(self) -> str:
        """Device, versions and extent, for below a table."""
        where, data = self.data["origin"], self.data["settings"]["data"]
        frames = sum(row["frames"] or 0 for row in self.rows[:1])
        count = data["videos"]
        extent = f"{count} video{'s' * (count != 1)} of split {data['split']}"
        extent += f", {frames} frames" if frames else ""
        if 0 < frames < FEW:
            extent += ", so few that differences of some points mean little"
        commit = where["commit"][:7]
        return f"{where['device_name']}, torch {where['torch']}, commit {commit}: {extent}"


def only(rows: Sequence[Row], label: str, **wanted: Any) -> Row:
    """The only row of a label with these values."""
    found = [
        row
        for row in rows
        if row["label"] == label and all(row[name] == value for name, value in wanted.items())
    ]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} rows {label} {wanted}; run the experiment again.")
    return found[0]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table; all columns but the first are numbers, or the first `text`."""
    marks = ["---"] * text + ["--:"] * (len(heads) - text)
    lines = [list(heads), marks, *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def budget(row: Row) -> str:
    """The policy of a row in a few characters."""
    if row["r"] is not None:
        return f"r = {row['r']}"
    if row["h"] is not None:
        return f"h = {row['h']:g}"
    if row["per_gate"] is not None:
        return f"{row['per_gate']:.1%} of each gate"
    return "its own" if row["preset"] in ("fast", "exact") else ""


def tradeoff_table(results: Results, keep: Callable[[Row], bool] = lambda _: True) -> str:
    """Every variant: accuracy, points below dense, operations, times fewer than dense."""
    name = {"fgfa_map50": "mAP50", "coco_map50": "mAP50", "top1": "top-1"}[results.metric]
    unit, digits = results.data["unit"].split()[0], 2 if "frame" in results.data["unit"] else 4
    rows = [
        (
            _label(row),
            budget(row),
            f"{results.accuracy(row):.1f}",
            "" if row is results.dense else f"{-results.loss(row):+.1f}",
            f"{row['operations']:.{digits}f}",
            f"{row['dense_operations'] / row['operations']:.1f}x",
        )
        for row in results.rows
        if keep(row)
    ]
    return markdown(("variant", "tokens", name, "to dense", unit, "fewer"), rows, text=2)


def _label(row: Row) -> str:
    label = row["label"].replace("Frame skipping, cost of", "skipping, as")
    return label if row["tuned_r"] is None else f"{label} at r = {row['tuned_r']}"


def verdict(holds: bool | None) -> str:
    """In words; None for part of a claim."""
    return {True: "**Holds here.**", False: "**Does not hold here.**", None: "**Holds in part.**"}[
        holds
    ]
