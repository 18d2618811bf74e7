"""Times of the paper's models (Table 2): ViTDet's backbone a frame, the whole of ViViT a video.

Time depends on shapes, so a made-up clip serves, and random weights where none are given.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.bench.results import origin
from eventful.evaluate.contenders import Contender, contender, dense_macs
from eventful.evaluate.evaluation import Progress
from eventful.evaluate.experiment import Experiment
from eventful.evaluate.models import Weights
from eventful.evaluate.report import Report, Row
from eventful.evaluate.variants import BASE, Variant
from eventful.models.vitdet.backbone import BackboneConfig, ViTDetBackbone
from eventful.models.vivit.model import ViViT, steps, vivit_b
from eventful.video.synthetic import moving_objects


def measure_runtime(
    experiment: Experiment,
    weights: Mapping[str, Path],
    device: str,
    dtype: str,
    frames: int,
    views: tuple[int, int],
    progress: Progress,
) -> Report:
    """Time every variant.

    Args:
        weights: `base` for ViTDet, `vivit` for ViViT; either may be left out.
        frames: of the clip for ViTDet; the first, a flush, is told apart.
        views: of a video for ViViT, temporal and spatial.
    """
    rows = []
    for variant in experiment.variants:
        measured = (
            _vitdet(variant, weights, device, dtype, frames, progress)
            if variant.model == "vitdet"
            else _vivit(variant, weights, device, dtype, views[0] * views[1], progress)
        )
        rows.append(Row.of(variant, **measured))
    settings = {
        "device": device,
        "dtype": dtype,
        "frames": frames,
        "views": list(views),
        "weights": sorted(weights),
    }
    return Report(experiment, tuple(rows), settings, origin(device))


def _vitdet(
    variant: Variant,
    weights: Mapping[str, Path],
    device: str,
    dtype: str,
    frames: int,
    progress: Progress,
) -> dict[str, Any]:
    """Milliseconds a frame of the backbone alone."""
    size = variant.size or 1024
    if BASE in weights:
        model: ViTDetBackbone = Weights(weights[BASE], size, dtype).vitdet(device).backbone
    else:
        model = _backbone(size).to(device, getattr(torch, dtype))
    step = contender(model, variant, size)
    progress.begin(variant, frames, 1)
    times, macs = [], 0
    for frame in moving_objects(frames, (size, size)):
        pixels = ((frame - 0.45) / 0.225).to(device, getattr(torch, dtype))
        times.append(_timed(step, pixels))
        macs += step.macs
        progress.advance(1)
    return {
        "ms": statistics.median(times[1:] or times),
        "first_ms": times[0],
        "operations": macs / frames / 1e9,
        "dense_operations": dense_macs(model, size) / 1e9,
        "frames": frames,
    }


def _vivit(
    variant: Variant,
    weights: Mapping[str, Path],
    device: str,
    dtype: str,
    views: int,
    progress: Progress,
) -> dict[str, Any]:
    """Milliseconds a video: all its views, each a flush and the steps after it."""
    size = variant.size or 320
    if "vivit" in weights:
        model = Weights(weights["vivit"], None, dtype).vivit(device)
    else:
        model = _vivit_b(size).to(device, getattr(torch, dtype))
    step = contender(model.spatial, variant, size)
    progress.begin(variant, views * model.config.frames, 1)
    times = []
    for view in range(views):
        clip = moving_objects(model.config.frames, (size, size), seed=view)
        video = torch.stack([(frame - 0.45) / 0.225 for frame in clip], dim=2)
        times.append(_timed_view(model, step, video.to(device, getattr(torch, dtype))))
        progress.advance(model.config.frames)
    return {"ms": sum(times), "first_ms": times[0], "frames": views * model.config.frames}


def _timed_view(model: ViViT, step: Contender, video: Tensor) -> float:
    def run() -> Tensor:
        step.reset()
        vectors = [step(part) for part in steps(video, model.config.tubelet)]
        with torch.no_grad():
            return model.classify(torch.stack(vectors, dim=1))

    return _milliseconds(run, video.device)


def _timed(step: Contender, pixels: Tensor) -> float:
    return _milliseconds(lambda: step(pixels), pixels.device)


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1000


@lru_cache(maxsize=1)
def _backbone(size: int) -> ViTDetBackbone:
    torch.manual_seed(0)
    return ViTDetBackbone(BackboneConfig(size=size, rel_pos_resize="bicubic")).eval()


@lru_cache(maxsize=1)
def _vivit_b(size: int) -> ViViT:
    torch.manual_seed(0)
    return vivit_b(size=size)
