"""Which runs a result needs: made now and stored, or read from where they were stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.mot15.clips import Clip
from benchmarks.mot15.contest import (
    SKIPS,
    Run,
    Setting,
    equal_share,
    run_carried,
    run_dense,
    run_preset,
    settings,
)
from benchmarks.mot15.settings import Clock, Options, say
from eventful import files
from eventful.models.anchor_free import PointHead
from eventful.paper.data import Box

MANIFEST = "predictions.json"


@dataclass(frozen=True)
class Detector:
    """The model that makes the runs."""

    backbone: nn.Module
    head: PointHead
    device: torch.device


@dataclass
class Kept:
    """A folder of finished runs. Without a detector, runs are only read."""

    folder: Path
    clock: Clock
    detector: Detector | None = None

    def runs(self, key: str, make: Callable[[Detector], list[Run]]) -> list[Run]:
        """Runs from their file, or made now and written to it."""
        path = self.folder / f"{key}.json"
        if path.exists():
            return [Run.read(data) for data in json.loads(path.read_text())]
        if self.detector is None:
            raise SystemExit(f"{path} is not there: predict it first, with --predict-only.")
        if self.clock.over():
            raise SystemExit(f"The time is up before {key}. Start again with the same --out.")
        runs = make(self.detector)
        files.write_json(path, [run.to_dict() for run in runs], indent=None)
        say(self.clock, f"ran {key}")
        return runs


@dataclass
class Predictions:
    """Runs on every clip, in the order of the clips.

    Attributes:
        settings: with the runs of each.
        carried: by setting, or number of frames from one dense frame to the next: frame skipping
            at its cost with carried tokens; empty where that is not measured.
    """

    dense: list[Run]
    settings: dict[Setting, list[Run]] = field(default_factory=dict)
    carried: dict[Setting | int, list[Run]] = field(default_factory=dict)


def gather(clips: Sequence[Clip], options: Options, kept: Kept) -> Predictions:
    """Everything that is to be scored."""
    made = Predictions(
        [
            kept.runs(
                f"dense-{c.name}",
                lambda d, c=c: [run_dense(d.backbone, d.head, c, d.device)],
            )[0]
            for c in clips
        ]
    )
    for preset in (*options.presets, *options.variants):
        chosen = settings(preset, options)
        by_clip = [
            kept.runs(
                f"{preset}-{c.name}",
                lambda d, c=c, m=chosen: run_preset(d.backbone, d.head, c, m, d.device),
            )
            for c in clips
        ]
        for i, setting in enumerate(chosen):
            made.settings[setting] = [runs[i] for runs in by_clip]
    if options.carried:
        _gather_carried(clips, kept, made)
    return made


def _gather_carried(clips: Sequence[Clip], kept: Kept, made: Predictions) -> None:
    """Frame skipping with carried tokens: every k frames, and at the cost of each `fast` run."""
    wanted: dict[Setting | int, list[float]] = {k: [1 / k] * len(clips) for k in SKIPS}
    for setting, runs in made.settings.items():
        if setting.preset.startswith("fast"):
            wanted[setting] = list(map(equal_share, runs, made.dense))
    for name, shares in wanted.items():
        made.carried[name] = [
            kept.runs(
                f"carried-{share:.4f}-{c.name}",
                lambda d, c=c, s=share: [run_carried(d.backbone, d.head, c, s, d.device)],
            )[0]
            for c, share in zip(clips, shares, strict=True)
        ]


def write_manifest(
    folder: Path, about: dict[str, Any], clips: Sequence[Clip], options: Options, runs: str
) -> Path:
    """What scoring needs beside the runs: the boxes of the data, and where the runs are.

    Args:
        about: the parts of the result that are known already.
        runs: name of their folder inside `folder`.
    """
    truth = [
        {"name": c.name, "size": c.size, "truth": [[asdict(b) for b in f] for f in c.truth]}
        for c in clips
    ]
    content = {"about": about, "options": asdict(options), "clips": truth, "runs": runs}
    files.write_json(folder / MANIFEST, content, indent=None)
    return folder / MANIFEST


def read_manifest(out: Path) -> tuple[dict[str, Any], list[Clip], Options, Path]:
    """The newest manifest of a folder: the result so far, clips without frames, options, runs."""
    found = sorted(out.glob(f"**/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"There is no {MANIFEST} below {out}: predict with --predict-only first.")
    content = json.loads(found[-1].read_text())
    clips = [
        Clip(
            clip["name"],
            torch.empty(0, 3, *clip["size"], dtype=torch.uint8),
            [[Box(**box) for box in frame] for frame in clip["truth"]],
        )
        for clip in content["clips"]
    ]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in content["options"].items()}
    return content["about"], clips, Options(**options), found[-1].parent / content["runs"]
