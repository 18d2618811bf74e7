"""Share of padding in a detector's input, and of skipped tokens among the rest.

A frame is resized and padded to a square (Section 5.1); padding never changes, so it is easy to
skip. The paper counts what is skipped among the tokens that are not padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import DataError
from eventful.models.vitdet.frames import Placement, fitted_size
from eventful.models.vitdet.model import ViTDetConfig
from eventful.paper.data.problems import OnProblem, missing, stop
from eventful.paper.data.records import Video
from eventful.rules.record import StepRecord
from eventful.video.source import ImageFiles, opened_image


@dataclass(frozen=True)
class Padding:
    """Shares of a padded square.

    Attributes:
        pixels: of its pixels, those outside the frame.
        tokens: of its tokens, those without a pixel of the frame.
    """

    pixels: float
    tokens: float


def content_mask(placement: Placement, grid: tuple[int, int], patch: int) -> Tensor:
    """Tokens (h, w) that show at least one pixel of the frame."""
    height, width = (-(-side // patch) for side in placement.content)
    mask = torch.zeros(grid, dtype=torch.bool)
    mask[:height, :width] = True
    return mask


def padding_of(original: tuple[int, int], config: ViTDetConfig) -> Padding:
    """The padding of a frame of this (height, width) in a detector."""
    backbone = config.backbone
    short = round(config.short_edge * backbone.size / backbone.trained_size)
    content = fitted_size(original, short, backbone.size)
    grid = backbone.size // backbone.patch
    mask = content_mask(Placement(original, content), (grid, grid), backbone.patch)
    area = content[0] * content[1] / backbone.size**2
    return Padding(1 - area, 1 - float(mask.double().mean()))


def mean_padding(
    videos: Iterable[Video], config: ViTDetConfig, on_problem: OnProblem = stop
) -> dict[str, float]:
    """The mean padding of a set, over its frames and over its videos; a video has one size."""
    rows = []
    for video in videos:
        try:
            rows.append((len(video), padding_of(frame_size(video), config)))
        except DataError as error:
            on_problem(error)
    frames, count = sum(length for length, _ in rows), len(rows)
    if not count:
        return {}
    return {
        "padded_pixels": sum(n * p.pixels for n, p in rows) / frames,
        "padded_tokens": sum(n * p.tokens for n, p in rows) / frames,
        "padded_pixels_by_video": sum(p.pixels for _, p in rows) / count,
        "padded_tokens_by_video": sum(p.tokens for _, p in rows) / count,
        "frames": frames,
        "videos": count,
    }


def frame_size(video: Video) -> tuple[int, int]:
    """(height, width) of a video; of image files only the header of the first is read."""
    if not isinstance(video.frames, ImageFiles):
        _, height, width = video.frames.read([0])[0].shape
        return int(height), int(width)
    path: Path = video.frames.path(0)
    if not path.is_file():
        raise missing(path, f"the first frame of {video.name}")
    with opened_image(path) as image:
        return int(image.height), int(image.width)


def skipped_if_none_is_padding(padded: float, tokens: int, r: int) -> float:
    """The paper's figure: the share of unpadded tokens skipped if all r selected are unpadded."""
    return 1 - min(1.0, r / (tokens * (1 - padded)))


class PaddingCounter:
    """Counts selected tokens inside and outside the padding over the steps of a video."""

    def __init__(self, patch: int) -> None:
        self._patch = patch
        self._selected = self._inside = self._content = 0
        self._steps = 0

    def add(self, record: StepRecord, placement: Placement) -> None:
        """Count one step; a flush, which selects everything, is left out."""
        if any(record.flushed):
            return
        layout = next(iter(record.layouts.values()))
        content = content_mask(placement, layout.grid, self._patch).flatten()
        for gate in record.gates.values():
            assert gate.mask is not None
            mask = gate.mask[0].cpu()
            self._selected += int(mask.sum())
            self._inside += int((mask & content).sum())
            self._content += int(content.sum())
        self._steps += 1

    def summary(self) -> dict[str, Any]:
        """Counts over all gates and steps."""
        return {
            "steps": self._steps,
            "selected": self._selected,
            "selected_inside": self._inside,
            "content": self._content,
        }


def skipped(summaries: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Measured shares: unpadded tokens skipped, and selected tokens that were padding.

    A share of nothing (of videos of one frame, which is a flush) is left out.
    """
    totals = {"selected": 0, "selected_inside": 0, "content": 0}
    for summary in summaries:
        for name in totals:
            totals[name] += summary[name]
    content, selected = totals["content"], totals["selected"]
    inside = totals["selected_inside"]
    shares = {"unpadded_skipped": content, "selected_padding": selected}
    return {name: 1 - inside / total for name, total in shares.items() if total}
