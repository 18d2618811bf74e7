"""Runs `eventful visualize`: frames through a stream, and pictures of its updates."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.cli.progress import shown_over
from eventful.cli.subjects import Features, Subject, subject
from eventful.cli.visualize import Options
from eventful.config import Config
from eventful.cost.units import in_words
from eventful.errors import ConfigError, MissingFileError, UnsupportedError
from eventful.modelspec.size import parse_size
from eventful.paper.data.mot import sequence_info
from eventful.pipeline.settings import made_config
from eventful.policies import Policy, Threshold
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from eventful.video.budgets import Budget, budget_at, parse_budget, parse_schedule
from eventful.video.charts import error_scale, operations_chart, spread, update_sheet
from eventful.video.overlay import UpdateView, find_gate, paper_gate
from eventful.video.scene import UpdateStep, scene
from eventful.video.sink import VideoSink
from eventful.video.source import FrameSource, ImageFiles, VideoFile
from eventful.video.synthetic import moving_objects

IMAGES = (".jpg", ".jpeg", ".png")
RATE = 15.0  # frames per second of image sequences without a rate
SYNTHETIC = (360, 640)
RUN = 32  # frames decoded at a time
PANEL = 480  # width of a panel of the video, at most


def run(options: Options, as_json: bool) -> None:
    """Make the video, the sheet, the chart and a table of the steps."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("No CUDA device here (`eventful doctor`); use --device cpu.")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be written to: {error}.") from None
    frames, fps = open_frames(options.source, options.start, options.frames)
    size = parse_size(options.size)
    shown = subject(options.model, options.weights, size, options.score, options.device)
    steps, gate = watch(shown, shown_over(frames, options.frames, "Streaming"), options)
    files = draw(steps, options, gate, shown.shows, fps)
    mean = sum(step.macs for step in steps) / len(steps)
    summary = {
        "frames": len(steps),
        "gate": gate,
        "gflops": mean / 1e9,
        "dense_gflops": steps[0].dense_macs / 1e9,
        "files": [str(path) for path in files],
    }
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    saving = steps[0].dense_macs / max(mean, 1)
    print(f"{len(steps)} frames, {in_words(mean)} a frame, {saving:.1f}x less than dense")
    for path in files:
        print(path)


def watch(
    shown: Subject, frames: Iterator[Tensor], options: Options
) -> tuple[list[UpdateStep], str]:
    """Step a stream over the frames, and keep what its gate did; returns also the gate's name."""
    schedule = _schedule(options)
    steps: list[UpdateStep] = []
    stream: Stream | None = None
    gate = ""
    for index, frame in enumerate(frames):
        budget = budget_at(schedule, index)
        if stream is None:
            if isinstance(shown, Features):
                shown.fit(int(frame.shape[1]), int(frame.shape[2]))
            stream = Stream(convert(shown.model, _config(options, budget)), maps=True)
        if budget is not None:
            stream.policy = budget.policy
        picture, prediction = shown.step(stream, frame)
        record = stream.last
        assert record is not None
        if not gate:
            gate = find_gate(record, options.gate) if options.gate else paper_gate(record)
        view = UpdateView.of(picture[None], record, gate)
        view = view.cut(*shown.content(next(iter(record.layouts.values()))))
        text = budget.text if budget is not None else ""
        place = options.start + index
        steps.append(UpdateStep.of(place, view, prediction, record, gate, budget=text))
    if not steps:
        raise MissingFileError(f"{options.source} has no frame {options.start}; start earlier.")
    return steps, gate


def draw(
    steps: Sequence[UpdateStep], options: Options, gate: str, shows: str, fps: float
) -> list[Path]:
    """Write all files and return their paths."""
    out = options.out
    files = [out / name for name in ("updates.mp4", "sheet.png", "operations.png", "steps.csv")]
    brightest = error_scale(steps)
    width = min(PANEL, int(steps[0].view.frame.shape[2]))
    with VideoSink(files[0], fps) as sink:
        for current in shown_over(range(len(steps)), len(steps), "Drawing"):
            sink.write(scene(steps, current, brightest, width=width, gate=gate, prediction=shows))
    update_sheet(spread(steps, options.columns), files[1], gate=gate, prediction=shows)
    operations_chart(steps, files[2], title=_title(options))
    files[3].write_text(_table(steps))
    return files


def open_frames(source: str, start: int, count: int) -> tuple[Iterator[Tensor], float]:
    """Frames (3, H, W) uint8 from a source, and how many of them a second has."""
    if source == "synthetic":
        made = moving_objects(start + count, SYNTHETIC, objects=4, noise=0.01)
        frames = ((frame[0] * 255).round().to(torch.uint8) for frame in made)
        return _part(frames, start), 25.0
    path = Path(source)
    if path.is_file():
        video = VideoFile(path)
        return _read(video, start, count), video.rate
    if not path.is_dir():
        raise MissingFileError(f"{path} is not there: a video, a MOT sequence or images.")
    folder, fps = path, RATE
    if (path / "seqinfo.ini").is_file():
        info = sequence_info(path / "seqinfo.ini")
        folder, fps = path / info.folder, info.rate or RATE
    there = folder.iterdir() if folder.is_dir() else ()
    names = (p.name for p in there if p.suffix.lower() in IMAGES)
    images = ImageFiles(folder, tuple(sorted(names, key=_counted)))
    if not images.names:
        raise MissingFileError(f"{folder} holds no images ({', '.join(IMAGES)}).")
    return _read(images, start, count), fps


def _counted(name: str) -> list[tuple[int, str]]:
    """Sort key that puts 2.jpg before 10.jpg: runs of digits count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(source: FrameSource, start: int, count: int) -> Iterator[Tensor]:
    stop = min(start + count, len(source))
    for first in range(start, stop, RUN):
        yield from source.read(range(first, min(first + RUN, stop)))


def _part(frames: Iterator[Tensor], start: int) -> Iterator[Tensor]:
    for index, frame in enumerate(frames):
        if index >= start:
            yield frame


def _schedule(options: Options) -> tuple[Budget, ...]:
    given = [name for name in ("r", "h", "budget") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other; give one.")
    if options.budget is not None:
        return parse_schedule(options.budget)
    return () if options.r is None else (parse_budget(options.r),)


def _config(options: Options, budget: Budget | None) -> Config:
    policy: Policy | None = None if options.h is None else Threshold(options.h)
    if budget is not None:
        policy = budget.policy
    # No fallback to dense steps: the pictures show the update rule.
    return made_config(options.preset, policy, fallback=False)


def _title(options: Options) -> str:
    name = Path(options.model).stem if options.model.endswith("safetensors") else options.model
    return f"{name.removeprefix('timm:')}, {options.preset}"


def _table(steps: Sequence[UpdateStep]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["frame", "flush", "budget", "updated", "tokens", "macs", "dense_macs", "ms"])
    for s in steps:
        row: list[Any] = [s.index, int(s.flush), s.budget, s.updated, s.tokens]
        writer.writerow([*row, s.macs, s.dense_macs, f"{s.ms:.3f}"])
    return text.getvalue()
