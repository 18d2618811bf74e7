"""Dense, skipping frames, and every preset: detections and costs on each sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mot15.clips import Clip
from benchmarks.mot15.settings import Clock, Options, say
from benchmarks.mot15.training import as_map, normalised
from eventful import files
from eventful.bench.contenders import Contender, Dense, Streamed, schedule
from eventful.config import Config
from eventful.models.anchor_free import PointHead
from eventful.models.vitdet import Detections
from eventful.paper.evaluate.metrics import coco_map50
from eventful.policies import Policy, TopFraction
from eventful.stream import Stream, StreamBatch
from eventful.surgery.conversion import convert

OWN_POLICY = ("fast", "exact")  # presets with a default policy, which is also measured
SKIPS = (2, 3, 4, 6, 8, 12, 16, 32)
CLASSES = ("person",)


@dataclass(frozen=True)
class Setting:
    """One preset under one policy."""

    preset: str
    policy: str
    share: float | None

    def choose(self) -> Policy | None:
        """The policy; None for the preset's own."""
        return None if self.share is None else TopFraction(self.share)


def settings(preset: str, options: Options) -> list[Setting]:
    made = [Setting(preset, f"top {share:.0%}", share) for share in options.shares]
    return made + ([Setting(preset, "own", None)] if preset in OWN_POLICY else [])


@dataclass
class Run:
    """One setting on one sequence, frame by frame."""

    found: list[Detections]
    macs: list[int]
    updated: list[float]
    flushed: list[bool]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "found": [detections.to_dict() for detections in self.found]}

    @classmethod
    def read(cls, data: dict[str, Any]) -> Run:
        """The inverse of `to_dict`."""
        found = [Detections.from_dict(detections) for detections in data["found"]]
        return cls(found, data["macs"], data["updated"], data["flushed"])


def detect(head: PointHead, tokens: Tensor, size: tuple[int, int]) -> list[Detections]:
    return [found.boxes_on_cpu() for found in head.detect(as_map(tokens, size), size)]


def run_dense(backbone: nn.Module, head: PointHead, clip: Clip, device: torch.device) -> Run:
    """The dense model on every frame."""
    macs, tokens = dense_cost(backbone, clip, device)
    dense = Dense(backbone.forward_features, macs)
    (run,) = run_contender(dense, head, clip, device, tokens=tokens)
    return run


def dense_cost(backbone: nn.Module, clip: Clip, device: torch.device) -> tuple[int, int]:
    """Operations of one frame, and its tokens, from the record of a flush."""
    stream = Stream(convert(backbone, Config.paper(TopFraction(1.0))))
    stream.call("forward_features", normalised(clip.frames[:1], device))
    record = stream.last
    assert record is not None
    return record.dense_macs, next(iter(record.blocks.values())).shape.tokens


def run_preset(
    backbone: nn.Module,
    head: PointHead,
    clip: Clip,
    made: Sequence[Setting],
    device: torch.device,
) -> list[Run]:
    """Every budget of one preset, as streams stepped together on the same frames."""
    # What is computed must not depend on how fast the machine is.
    batch = StreamBatch(convert(backbone, Config.preset(made[0].preset, fallback=False)))
    for setting in made:
        batch.join(setting.policy, setting.choose())
    streamed = Streamed(batch, "forward_features")
    return run_contender(streamed, head, clip, device, streams=len(made))


@torch.no_grad()
def run_contender(
    contender: Contender,
    head: PointHead,
    clip: Clip,
    device: torch.device,
    *,
    streams: int = 1,
    tokens: int = 0,
) -> list[Run]:
    """One run per stream of the contender, all on the same frames.

    Args:
        tokens: updated on each frame by a contender without records.
    """
    runs = [Run([], [], [], []) for _ in range(streams)]
    for frame in clip.frames:
        pixels = normalised(frame[None], device).expand(streams, -1, -1, -1)
        found = detect(head, contender(pixels), clip.size)
        record = contender.record
        if record is None:
            macs, updated, flushed = [contender.macs], [float(tokens)], [True]
        else:
            macs = [operations.total for operations in record.operations()]
            counts = torch.stack([gate.counts for gate in record.gates.values()])
            updated, flushed = counts.float().mean(0).tolist(), list(record.flushed)
        for i, run in enumerate(runs):
            run.found.append(found[i])
            run.macs.append(macs[i])
            run.updated.append(float(updated[i]))
            run.flushed.append(bool(flushed[i]))
    return runs


def skipped(dense: Run, share: float) -> Run:
    """The dense model on this share of the frames, evenly, its boxes repeated in between."""
    run, last = Run([], [], [], []), 0
    for t, new in zip(range(len(dense.found)), schedule(share), strict=False):
        last = t if new else last
        run.found.append(dense.found[last])
        run.macs.append(dense.macs[t] if new else 0)
        run.updated.append(dense.updated[t] if new else 0.0)
        run.flushed.append(new)
    return run


@dataclass(frozen=True)
class Score:
    """A setting on one sequence, or on all of them.

    Attributes:
        map50: COCO's average precision at IoU 0.5 over the frames.
        gmacs: operations a frame, the mean over all frames, the first one included.
        cost: the same as a share of dense.
        updated: share of tokens updated, the mean over gates and frames.
        flushes: frames on which everything was recomputed.
    """

    sequence: str
    frames: int
    map50: float
    gmacs: float
    cost: float
    updated: float
    flushes: int


def score(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip], name: str) -> Score:
    found = [d for run in runs for d in run.found]
    truth = [boxes for clip in clips for boxes in clip.truth]
    macs = sum(sum(run.macs) for run in runs)
    return Score(
        sequence=name,
        frames=len(found),
        map50=coco_map50(found, truth, CLASSES).value,
        gmacs=macs / len(found) / 1e9,
        cost=macs / sum(sum(run.macs) for run in dense),
        updated=sum(sum(r.updated) for r in runs) / sum(sum(r.updated) for r in dense),
        flushes=sum(sum(run.flushed) for run in runs),
    )


def scores(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip]) -> list[dict]:
    """Over all sequences, then one by one."""
    made = [score(runs, dense, clips, "all")]
    made += [score([r], [d], [c], c.name) for r, d, c in zip(runs, dense, clips, strict=True)]
    return [asdict(s) for s in made]


def evaluate(
    backbone: nn.Module,
    head: PointHead,
    clips: Sequence[Clip],
    options: Options,
    device: torch.device,
    kept: Path,
    clock: Clock,
) -> list[dict[str, Any]]:
    """Rows of the result. Finished runs are stored in a folder and not repeated."""
    dense = [
        stored(kept, f"dense-{c.name}", clock, lambda c=c: [run_dense(backbone, head, c, device)])[
            0
        ]
        for c in clips
    ]
    rows = [{"preset": "dense", "policy": "", "share": 1.0, "scores": scores(dense, dense, clips)}]
    for every in SKIPS:
        runs = [skipped(run, 1 / every) for run in dense]
        row = {"preset": "skip", "policy": f"every {every}", "share": 1 / every}
        rows.append({**row, "scores": scores(runs, dense, clips)})
    for preset in options.presets:
        made = settings(preset, options)
        by_clip = [
            stored(
                kept,
                f"{preset}-{c.name}",
                clock,
                lambda c=c, m=made: run_preset(backbone, head, c, m, device),
            )
            for c in clips
        ]
        for i, setting in enumerate(made):
            rows.append(compared(setting, [runs[i] for runs in by_clip], dense, clips, clock))
    return rows


def stored(folder: Path, key: str, clock: Clock, make: Callable[[], list[Run]]) -> list[Run]:
    """Runs from their file, or made now and written to it."""
    path = folder / f"{key}.json"
    if path.exists():
        return [Run.read(data) for data in json.loads(path.read_text())]
    if clock.over():
        raise SystemExit(f"The time is up before {key}. Start again with the same --out.")
    runs = make()
    files.write_json(path, [run.to_dict() for run in runs], indent=None)
    say(clock, f"ran {key}")
    return runs


def compared(
    setting: Setting,
    runs: Sequence[Run],
    dense: Sequence[Run],
    clips: Sequence[Clip],
    clock: Clock,
) -> dict[str, Any]:
    """The row of a setting, with the scores of frame skipping at its cost."""
    equal = [
        skipped(d, min(1.0, sum(r.macs) / sum(d.macs))) for r, d in zip(runs, dense, strict=True)
    ]
    own, skip = scores(runs, dense, clips), scores(equal, dense, clips)
    say(
        clock,
        f"{setting.preset:10} {setting.policy:8} mAP50 {own[0]['map50']:.3f} at "
        f"{own[0]['cost']:.1%} of the operations, skipping {skip[0]['map50']:.3f}",
    )
    return {**asdict(setting), "scores": own, "skip": skip}
