"""The two models that come with the package: their sizes, their schedules, their training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from eventful.errors import ConfigError
from eventful.models.saving import save_model
from eventful.models.vitdet import BackboneConfig, Detections, HeadConfig, ViTDet, ViTDetConfig
from eventful.models.vivit import ViViT, ViViTConfig
from eventful.paper.data import Box
from eventful.paper.data.world import SPLITS, boxes_in
from eventful.paper.evaluate.metrics import DetectionScore, fgfa_map50
from eventful.paper.train.engine import LoopOptions, StepProgress, Trainer
from eventful.paper.train.motions import MotionObjective, clips_of, motion_clips, normalised
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import Recipe
from eventful.paper.train.world import (
    ASPECTS,
    FIRST_SEED,
    SceneSeeds,
    StreetObjective,
    as_inputs,
    collate,
    street_frames,
)
from eventful.video.world import ACTIONS, CLASSES, Boxes, boxes_of

CLASSES_OF = {"detector": CLASSES, "actions": ACTIONS}
VALIDATION = range(900_000, 900_384)  # seeds of scenes that a run is scored on


def detector() -> ViTDet:
    """A ViTDet of 4 million parameters for frames of 512 px, with random weights."""
    side = 512
    trunk = BackboneConfig(
        size=side, trained_size=side, dim=160, depth=8, heads=5, window=7,
        global_blocks=(1, 3, 5, 7), pretrained_grid=side // 16, class_slot=False,
    )  # fmt: skip
    heads = HeadConfig(len(CLASSES), convs=2, hidden=160, samples=64, shared_boxes=True)
    return ViTDet(
        ViTDetConfig(
            trunk, heads, channels=80, proposals=(300, 100), short_edge=side, candidates=(600, 300)
        )
    )


def actions() -> ViViT:
    """A factorised ViViT of 4 million parameters for clips of 32 frames of 160 px."""
    return ViViT(
        ViViTConfig(len(ACTIONS), 160, dim=192, depth=6, temporal_depth=3, heads=3, dropout=0.1)
    )


MODELS: dict[str, Callable[[], ViTDet | ViViT]] = {"detector": detector, "actions": actions}


@dataclass(frozen=True)
class Phase:
    """A part of a training run.

    Attributes:
        steps: of the whole phase.
        prepare: makes the objective ready for it.
        kept: how many scenes are rendered once and used again; by default each sample is of
            another scene.
    """

    name: str
    steps: int
    recipe: Recipe
    prepare: Callable[[nn.Module], None] = lambda objective: None
    kept: int | None = None

    @property
    def scenes(self) -> int:
        """How many different scenes it uses."""
        return self.kept or self.steps * self.recipe.batch

    def scaled(self, factor: float) -> Phase:
        """The same with more or fewer steps."""
        kept = self.kept and max(1, round(self.kept * min(1.0, factor)))
        return replace(self, steps=max(1, round(self.steps * factor)), kept=kept)


def _with_boxes(objective: nn.Module) -> None:
    assert isinstance(objective, StreetObjective)
    objective.boxes = True


def _recipe(batch: int, lr: float) -> Recipe:
    return Recipe(
        epochs=1, batch=batch, lr=lr, weight_decay=0.05, warmup=200, cosine=True, clip=1.0,
        precision="bfloat16",
    )  # fmt: skip


PHASES: dict[str, tuple[Phase, ...]] = {
    "detector": (
        Phase("tokens", 1314, _recipe(64, 1e-3)),
        Phase("boxes", 1880, _recipe(32, 6e-4), _with_boxes),
        Phase("more", 1650, _recipe(64, 5e-4), _with_boxes),
    ),
    "actions": (Phase("clips", 10000, _recipe(32, 1e-3), kept=16384),),
}


def train_shipped(
    name: str,
    folder: Path,
    processes: Processes,
    *,
    phases: Sequence[Phase] | None = None,
    options: LoopOptions | None = None,
    on_step: Callable[[str, StepProgress], None] = lambda phase, step: None,
) -> ViTDet | ViViT | None:
    """Train one of the models that come with the package; None if time ended before it did.

    Resumes from the checkpoints of the folder, in the last phase that has one, and writes
    `model.safetensors` in the end.
    """
    if name not in PHASES:
        raise ConfigError(f"No model {name!r}; there are {', '.join(PHASES)}.")
    torch.manual_seed(0)
    model = MODELS[name]()
    objective = (
        StreetObjective(model, boxes=False)
        if isinstance(model, ViTDet)
        else MotionObjective(model, model.config.dropout)
    )
    first, began = 0, time.monotonic()
    options = options or LoopOptions()
    limit = options.seconds
    chosen = list(phases or PHASES[name])
    if FIRST_SEED + sum(p.scenes for p in chosen) > SPLITS["train"].start:
        raise ConfigError("So many steps would use the scenes of world:street; train fewer.")
    begun = [n for n, p in enumerate(chosen) if any((folder / p.name / "checkpoints").glob("*"))]
    done = chosen[: begun[-1]] if begun else []
    first += sum(phase.scenes for phase in done)
    for phase in chosen[len(done) :]:
        if limit is not None:
            options = replace(options, seconds=max(0.0, limit - (time.monotonic() - began)))
        phase.prepare(objective)
        if phase.kept and isinstance(objective, MotionObjective):
            objective.keep(range(FIRST_SEED + first, FIRST_SEED + first + phase.kept))
        scenes = SceneSeeds(phase.steps * phase.recipe.batch, phase.kept, first)
        trainer = Trainer(
            objective, scenes, phase.recipe, folder / phase.name, processes, collate=collate,
            about={"model": model.config.to_dict(), "steps": phase.steps}, options=options,
        )  # fmt: skip
        trainer.on_step = _named(phase.name, on_step)
        if trainer.fit().epoch < phase.recipe.epochs:
            return None
        first += phase.scenes
    if processes.first:
        save_model(model, folder / "model.safetensors", classes=CLASSES_OF[name])
        half = torch.float16  # as it comes with the package
        save_model(model, folder / f"{name}.safetensors", classes=CLASSES_OF[name], dtype=half)
    return model.eval()


def _named(
    phase: str, on_step: Callable[[str, StepProgress], None]
) -> Callable[[StepProgress], None]:
    return lambda step: on_step(phase, step)


def scored(model: ViTDet | ViViT, seeds: Sequence[int] | None = None) -> dict[str, float]:
    """The dense model's mAP50 or top-1 on scenes that it was not trained on."""
    seeds = VALIDATION if seeds is None else seeds
    if isinstance(model, ViTDet):
        return {"map50": score_detector(model, seeds).value, "frames": len(seeds)}
    return {"top1": float(score_actions(model, seeds).float().mean()), "clips": len(seeds)}


@torch.no_grad()
def score_detector(model: ViTDet, seeds: Sequence[int]) -> DetectionScore:
    """mAP50 of the dense model on one frame of each of some scenes."""
    found: list[Detections] = []
    truth: list[tuple[Box, ...]] = []
    side, device = model.config.backbone.size, next(model.parameters()).device
    for number, first in enumerate(range(0, len(seeds), 32)):
        some = torch.tensor(seeds[first : first + 32], dtype=torch.int32, device=device)
        shot = street_frames(some, side, ASPECTS[number % len(ASPECTS)], 3, False)
        boxes = boxes_of(shot)
        pixels, _, places = as_inputs(shot, boxes, side)
        found += [part.boxes_on_cpu() for part in model.eval()(pixels, places)]
        boxes = Boxes(**{key: value.cpu() for key, value in vars(boxes).items()})
        truth += [boxes_in(boxes, index) for index in range(len(some))]
    return fgfa_map50(found, truth, CLASSES)


@torch.no_grad()
def score_actions(model: ViViT, seeds: Sequence[int]) -> Tensor:
    """Whether the dense model is right (n,) about one clip of each of some scenes."""
    right: list[Tensor] = []
    config, device = model.config, next(model.parameters()).device
    for first in range(0, len(seeds), 16):
        some = torch.tensor(seeds[first : first + 16], dtype=torch.int32, device=device)
        shot, labels = motion_clips(some, config.frames, config.size, False)
        clips = normalised(clips_of(shot, len(labels)))
        right.append(model.eval()(clips).argmax(dim=1) == labels)
    return torch.cat(right).cpu()
