"""Fine-tuning a ViTDet on frames with boxes: VID and DET, COCO-style data, MOTChallenge."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eventful.errors import CheckpointError, ConfigError
from eventful.models.key_formats import KeyReport
from eventful.models.loading import load_model, load_weights
from eventful.models.saving import save_model
from eventful.models.vitdet import Detections, HeadConfig, ViTDet, ViTDetConfig
from eventful.paper.data import Box, VideoSet, open_dataset
from eventful.paper.data.problems import OnProblem, stop
from eventful.paper.evaluate.metrics import COCO_LIBRARY, coco_map50, fgfa_map50
from eventful.paper.train.engine import LoopOptions, StepProgress, Trainer
from eventful.paper.train.frames import (
    Augment,
    Batch,
    FrameExamples,
    at_most_per_class,
    collate,
    spread_frames,
)
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import VID, Recipe
from eventful.surgery import libraries

Frozen = Literal["nothing", "backbone"]
Heads = Literal["same", "faster"]


@dataclass(frozen=True)
class DetectorPlan:
    """What to train a detector on, and how.

    VID and DET are thinned, because videos are alike from frame to frame and some classes of DET
    have far more images than others. How far is a choice of ours: the paper names the protocols it
    follows and no numbers.

    Attributes:
        data: folder of the dataset, or a COCO-style JSON file.
        split: to train on; None takes `train`, or the only one there is.
        also: further splits of the same dataset, such as `det_train`.
        frames_per_video: at most so many frames of a video, evenly spread; None for all.
        images_per_class: at most so many images of a class of the further splits; None for all.
        val_split: to score on after each epoch; None does not.
        val_frames: at most so many frames of each of its videos.
        size: side of the padded square; None for the model's own.
        heads: `same` as those of the weights, or `faster`: the Faster R-CNN of the paper's VID
            detector, whatever the weights have, e.g. COCO's cascade.
        freeze: what keeps its weights.
        drop_path: of the backbone, see `eventful.models.blocks.Block`.
    """

    data: str | Path
    split: str = "train"
    also: tuple[str, ...] = ()
    frames_per_video: int | None = 15
    images_per_class: int | None = 2000
    val_split: str | None = None
    val_frames: int | None = None
    size: int | None = None
    heads: Heads = "same"
    freeze: Frozen = "nothing"
    drop_path: float = 0.0
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        object.__setattr__(self, "also", tuple(self.also))
        if self.freeze not in ("nothing", "backbone"):
            raise ConfigError(f"freeze is 'nothing' or 'backbone', not {self.freeze!r}.")
        if self.heads not in ("same", "faster"):
            raise ConfigError(f"heads is 'same' or 'faster', not {self.heads!r}.")

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON; without the path of the data, which may change."""
        return {key: value for key, value in asdict(self).items() if key != "data"}


class DetectorObjective(nn.Module):
    """A detector's losses as a forward pass."""

    def __init__(self, model: ViTDet) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """See `ViTDet.losses`."""
        return self.model.losses(batch.pixels, batch.targets, batch.placements)


def start_from(
    weights: Path,
    classes: int,
    *,
    size: int | None = None,
    drop_path: float = 0.0,
    heads: Heads = "same",
) -> tuple[ViTDet, KeyReport]:
    """The detector of a file with heads for `classes` classes.

    Layers with another number of classes are initialised randomly; the report names them. A mask
    head would need that as well, but has no loss to train it, so it is removed.
    """
    overrides: dict[str, Any] = {"drop_path": drop_path}
    known = load_model(weights, **overrides, **({} if size is None else {"size": size}))
    if not isinstance(known, ViTDet):
        raise CheckpointError(
            f"{weights} holds a {type(known).__name__}; to train a detector give the weights of a "
            "whole ViTDet (eventful.save_model, or eventful weights convert)."
        )
    config = known.config
    if heads == "faster":
        config = faster_rcnn(config)
    masks = config.heads.masks and config.heads.classes == classes
    model = ViTDet(replace(config, heads=replace(config.heads, classes=classes, masks=masks)))
    return model, load_weights(model, weights, strict=False)


def faster_rcnn(config: ViTDetConfig) -> ViTDetConfig:
    """The paper's VID detector around a backbone; what has to fit the weights stays."""
    trunk, usual, heads = config.backbone, ViTDetConfig(), config.heads
    scale = trunk.trained_size / usual.backbone.trained_size
    return ViTDetConfig(
        replace(trunk, rel_pos_resize="bicubic"),
        HeadConfig(heads.classes, convs=heads.convs, hidden=heads.hidden),
        config.channels,
        short_edge=round(usual.short_edge * scale),
    )


def parameter_groups(model: ViTDet, layer_decay: float) -> list[dict[str, Any]]:
    """Parameters to train by their depth, with the share of the learning rate of each.

    The embedding is layer 0, block i is layer i + 1, and everything after the backbone is the last.
    """
    last = len(model.backbone.blocks) + 1
    layers: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(_layer(name, last), []).append(parameter)
    return [
        {"params": layers[layer], "scale": layer_decay ** (last - layer)}
        for layer in sorted(layers)
    ]


def _layer(name: str, last: int) -> int:
    if not name.startswith("backbone."):
        return last
    block = re.match(r"backbone\.blocks\.(\d+)\.", name)
    return int(block[1]) + 1 if block else 0


def freeze(model: ViTDet, what: Frozen) -> None:
    """Freeze parameters; the mask head, which has no loss, is always frozen."""
    if model.heads.mask is not None:
        model.heads.mask.requires_grad_(False)
    if what == "backbone":
        model.backbone.requires_grad_(False)


def training_frames(plan: DetectorPlan, on_problem: OnProblem = stop) -> tuple[VideoSet, list[Any]]:
    """The training split, and the frames selected from it and from the further splits."""
    videos = open_dataset(plan.data, plan.split, on_problem=on_problem)
    if videos.task != "detection":
        raise ConfigError(f"{plan.data} is {videos.format}, which has no boxes to train on.")
    frames = spread_frames(videos, plan.frames_per_video)
    for split in plan.also:
        more = open_dataset(plan.data, split, on_problem=on_problem)
        if plan.images_per_class is not None:
            more = at_most_per_class(more, plan.images_per_class)
        frames += spread_frames(more, plan.frames_per_video)
    return videos, frames


def train_detector(
    plan: DetectorPlan,
    weights: Path,
    folder: Path,
    processes: Processes,
    *,
    recipe: Recipe = VID,
    options: LoopOptions | None = None,
    on_problem: OnProblem = stop,
    on_step: Callable[[StepProgress], None] = lambda _: None,
) -> ViTDet:
    """Fine-tune, and write `model.safetensors` into the folder; resumes an interrupted run."""
    videos, frames = training_frames(plan, on_problem)
    torch.manual_seed(recipe.seed)  # for the layers initialised randomly
    model, report = start_from(
        weights,
        len(videos.classes),
        size=plan.size,
        drop_path=plan.drop_path,
        heads=plan.heads,
    )
    freeze(model, plan.freeze)
    size, short = model.config.backbone.size, model.config.short_side
    trainer = Trainer(
        DetectorObjective(model),
        FrameExamples(frames, size, short, plan.augment, recipe.seed, on_problem),
        recipe,
        folder,
        processes,
        collate=collate,
        groups=parameter_groups(model, recipe.layer_decay),
        about={
            "plan": plan.to_dict(),
            "model": model.config.to_dict(),
            "frames": len(frames),
            "anew": sorted({*report.missing, *report.mismatched}),
        },
        validate=_validation(model, plan, processes, on_problem),
        options=options,
    )
    trainer.on_step = on_step
    position = trainer.fit()
    if processes.first and position.epoch == recipe.epochs:
        save_model(model, folder / "model.safetensors")
    return model.eval()


def _validation(
    model: ViTDet, plan: DetectorPlan, processes: Processes, on_problem: OnProblem
) -> Callable[[], dict[str, float]] | None:
    if plan.val_split is None:
        return None
    libraries.load(COCO_LIBRARY)  # raise now, not at the first validation
    videos = open_dataset(plan.data, plan.val_split, on_problem=on_problem)
    return lambda: score_dense(model, videos, processes, plan.val_frames)


@torch.no_grad()
def score_dense(
    model: ViTDet, videos: VideoSet, processes: Processes, limit: int | None = None
) -> dict[str, float]:
    """mAP50 of the dense model on frames of each video, divided among the processes.

    For monitoring; use `eventful evaluate` for numbers to publish.
    """
    frames = spread_frames(videos, limit)
    mine: list[tuple[int, Detections, Sequence[Box]]] = []
    for number in range(processes.rank, len(frames), processes.world):
        video, position = frames[number]
        frame = video.frame(position)
        pixels, placement = model.prepare(frame.pixels)
        (found,) = model(pixels, [placement])
        mine.append((number, found.boxes_on_cpu(), frame.boxes))
    every = sorted(
        (entry for part in processes.gather(mine) for entry in part), key=lambda entry: entry[0]
    )
    found_boxes, truth = [entry[1] for entry in every], [entry[2] for entry in every]
    return {
        "coco_map50": coco_map50(found_boxes, truth, videos.classes).value,
        "fgfa_map50": fgfa_map50(found_boxes, truth, videos.classes).value,
    }
