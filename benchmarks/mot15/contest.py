"""Dense, skipping frames, and every config: detections and costs on a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mot15.clips import Clip
from benchmarks.mot15.settings import VARIANTS, Options
from benchmarks.mot15.training import as_map, normalised
from eventful.bench.contenders import Contender, Dense, Streamed, schedule
from eventful.bench.video.steps import Carrier
from eventful.config import Config
from eventful.models.anchor_free import PointHead
from eventful.models.vitdet import Detections
from eventful.policies import Policy, TopFraction
from eventful.stream import Stream, StreamBatch
from eventful.surgery.conversion import convert

OWN_POLICY = ("fast", "exact", *VARIANTS)  # those with a default policy, which is also measured
SKIPS = (2, 3, 4, 6, 8, 12, 16, 32)


@dataclass(frozen=True)
class Setting:
    """One preset, or variant of `fast`, under one policy."""

    preset: str
    policy: str
    share: float | None

    def choose(self) -> Policy | None:
        """The policy; None for the preset's own."""
        return None if self.share is None else TopFraction(self.share)


def rule_of(preset: str) -> Config:
    """The config of a preset or variant."""
    # What is computed must not depend on how fast the machine is.
    if preset in VARIANTS:
        return Config.fast(fallback=False, **VARIANTS[preset])
    return Config.preset(preset, fallback=False)


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
    batch = StreamBatch(convert(backbone, rule_of(made[0].preset)))
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


@torch.no_grad()
def run_carried(
    backbone: nn.Module, head: PointHead, clip: Clip, share: float, device: torch.device
) -> Run:
    """The dense model on a share of the frames; in between its tokens move with the picture.

    The head runs on every frame. Its operations are not counted, nor are those of the motion.
    """
    macs, tokens = dense_cost(backbone, clip, device)
    carrier, run = Carrier(clip.layout), Run([], [], [], [])
    held: Tensor | None = None
    for frame, due in zip(clip.frames, schedule(share), strict=False):
        pixels = normalised(frame[None], device)
        if held is None or due:
            carrier.see(pixels)
            held = backbone.forward_features(pixels)
        else:
            held = carrier(held, pixels)
        run.found += detect(head, held, clip.size)
        run.macs.append(macs if due else 0)
        run.updated.append(float(tokens) if due else 0.0)
        run.flushed.append(due)
    return run


def equal_share(run: Run, dense: Run) -> float:
    """The share of frames on which dense costs as much as a run."""
    return min(1.0, sum(run.macs) / sum(dense.macs))
