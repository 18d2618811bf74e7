"""A calibration as data: for `--json`, `calibration.json` and the policy file."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventful import files
from eventful.bench.video.measure import VideoPlan
from eventful.calibrate.choose import Choice, Limits, choose
from eventful.calibrate.measure import LEAST, Measured
from eventful.calibrate.rows import DenseTimes, Row, counted_frames, dense_times, rows_of
from eventful.config import Config

JSON, PICTURE, POLICY = "calibration.json", "calibration.png", "policy.toml"


@dataclass(frozen=True)
class Report:
    """What was measured, and what follows from it.

    Attributes:
        weights: name of the file of weights; "" for random ones, "own" for those of a folder.
        where: device, versions and commit of the measurement.
        choice: None where too few frames were measured, or no config was among the settings.
    """

    plan: VideoPlan
    weights: str
    measured: Measured
    limits: Limits
    where: Mapping[str, str]
    rows: list[Row]
    choice: Choice | None
    dense: DenseTimes | None

    @classmethod
    def of(
        cls,
        plan: VideoPlan,
        weights: str | None,
        measured: Measured,
        limits: Limits,
        where: Mapping[str, str],
    ) -> Report:
        """The rows of a measurement and the choice among them."""
        rows = rows_of(measured)
        enough = counted_frames(measured) >= LEAST
        choice = choose(rows, limits) if enough else None
        named = "" if plan.backbone.random else "own"
        if weights is not None:
            named = Path(weights).name
        return cls(plan, named, measured, limits, where, rows, choice, dense_times(measured))

    @property
    def notes(self) -> list[str]:
        """What a reader should know."""
        made = list(self.measured.notes)
        if not self.weights:
            made.append("The weights are random, so the errors say little. Give --weights.")
        if self.measured.interrupted:
            whole = sum(len(clip.frames) for clip in self.measured.clips)
            made.append(f"Interrupted after {counted_frames(self.measured)} of {whole} frames.")
        if self.choice is not None and (skip := self.choice.better_skip) is not None:
            assert skip.setting is not None
            cost = "time" if skip.time is not None else "operations"
            made.append(
                f"Frame skipping is better here: dense on one frame in {skip.setting.every} takes "
                f"{skip.cost:.0%} of the {cost} with an error of {skip.error_p90:.2g} (90 %). It "
                "misses what appears between its frames."
            )
        return made

    @property
    def config(self) -> Config | None:
        """Of the chosen setting; None if none is within the limits."""
        if self.choice is None or not self.choice.met or self.choice.row.setting is None:
            return None
        return self.choice.row.setting.config

    @property
    def dense_is_cheaper(self) -> bool:
        """Whether the chosen setting costs as much as the dense model: it is not recommended."""
        return self.choice is not None and self.choice.met and self.choice.row.cost >= 1

    def to_dict(self) -> dict[str, Any]:
        """As plain data; None where a number is not known."""
        choice, met = self.choice, self.config is not None
        chosen = choice.row.name if choice is not None and met else None
        return {
            **self._subject(),
            "dense_path": None if self.dense is None else self.dense.path,
            "dense_ms": None if self.dense is None else statistics.median(self.dense.ms),
            "limits": dataclasses.asdict(self.limits),
            "chosen": chosen,
            "recommended": None if self.dense_is_cheaper else chosen,
            "nearest": choice.row.name if choice is not None and not met else None,
            "interrupted": self.measured.interrupted,
            "notes": self.notes,
            "settings": [_as_data(row) for row in self.rows],
            "by_frame": self._by_frame(),
            "origin": dict(self.where),
        }

    def about(self) -> dict[str, Any]:
        """The table `[calibration]` of the policy file."""
        assert self.choice is not None
        row = self.choice.row
        numbers = {name: _rounded(value) for name, value in _numbers(row).items()}
        limits = {f"limit_{key}": value for key, value in dataclasses.asdict(self.limits).items()}
        versions = ("date", "device_name", "threads", "torch", "timm", "eventful", "commit")
        known = {name: self.where[name] for name in versions if self.where.get(name)}
        return {"setting": row.name, **numbers, **limits, **self._subject(), **known}

    def write(self, folder: Path) -> None:
        """Write `calibration.json`."""
        files.write_json(folder / JSON, self.to_dict())

    def _subject(self) -> dict[str, Any]:
        clips = self.measured.clips
        return {
            "model": self.plan.backbone.name,
            "weights": self.weights or "random",
            "videos": [clip.name for clip in clips],
            "size": ", ".join(dict.fromkeys(clip.size for clip in clips)),
            "frames": counted_frames(self.measured),
            "device": self.plan.device,
            "precision": self.plan.precision,
        }

    def _by_frame(self) -> dict[str, dict[str, list[list[float]]]]:
        """Error, operations and milliseconds of each frame: by setting, then by clip."""
        columns = ("error", "operations", "ms") if self.measured.timed else ("error", "operations")
        names = [setting.name for setting in self.measured.settings]
        return {
            name: {
                column: [
                    [_rounded(getattr(frame.settings[name], column)) for frame in frames]
                    for frames in self.measured.frames
                ]
                for column in columns
            }
            for name in names
        }


def _as_data(row: Row) -> dict[str, Any]:
    setting = row.setting
    config = None if setting is None else setting.config
    return {
        "setting": row.name,
        "config": None if config is None else repr(config),
        "every": setting.every or None if setting is not None else None,
        **_numbers(row),
    }


def _numbers(row: Row) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "setting"}
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> Any:
    """Four digits are more than a measurement has."""
    return None if value is None else float(f"{value:.4g}")
