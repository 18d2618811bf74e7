"""The published training settings, by name."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from eventful.errors import ConfigError

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; two runs with the same recipe, data and processes give the same weights.

    Attributes:
        batch: samples of one step, over all processes.
        lr: the highest learning rate of AdamW.
        weight_decay: of every parameter.
        warmup: steps over which the rate rises from nothing.
        cosine: the rate falls to nothing along a cosine over the whole run.
        decay_epochs: epochs, from 0, at whose start the rate is multiplied by `decay`.
        layer_decay: factor on the rate from each block of a backbone to the one before it.
        clip: largest norm of the gradient; None for no clipping.
        dropout: ahead of the classifier.
        precision: what the forward pass computes in; the weights stay float32.
        seed: of the order of the samples, their augmentation and dropout.
    """

    epochs: int
    batch: int
    lr: float
    weight_decay: float
    warmup: int = 0
    cosine: bool = False
    decay_epochs: tuple[int, ...] = ()
    decay: float = 0.1
    layer_decay: float = 1.0
    clip: float | None = None
    dropout: float = 0.0
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay_epochs", tuple(self.decay_epochs))
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a recipe is {getattr(self, name)}; give 1 or more.")
        if not self.lr > 0 or self.weight_decay < 0 or self.warmup < 0:
            raise ConfigError("A recipe needs lr > 0, and weight_decay and warmup from 0 up.")
        if not 0 < self.layer_decay <= 1 or not 0 <= self.dropout < 1:
            raise ConfigError("A recipe needs layer_decay in (0, 1] and dropout in [0, 1).")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip of a recipe is {self.clip}; give more than 0, or None.")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision is one of {', '.join(get_args(Precision))}.")

    def rate(self, step: int, epoch: int, steps: int | None = None) -> float:
        """The factor on `lr` at a step, counted from 0, of `steps`."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        fall = self.decay ** sum(epoch >= start for start in self.decay_epochs)
        if self.cosine and steps:
            fall *= 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0))
        return rise * fall

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return {**asdict(self), "decay_epochs": list(self.decay_epochs)}


# The paper's supplement: "Fine-tuning ViTDet for VID". It states a linear warm-up but not how long;
# 1000 steps are ours.
VID = Recipe(epochs=5, batch=8, lr=1e-4, weight_decay=0.1, warmup=1000, decay_epochs=(2,))
# "Fine-tuning the ViViT temporal model", and the same for Kinetics-400.
EPIC = Recipe(epochs=5, batch=8, lr=1e-5, weight_decay=0.05, dropout=0.5)
KINETICS = Recipe(epochs=10, batch=16, lr=2e-6, weight_decay=0.05, dropout=0.5)

RECIPES = {"vid": VID, "epic": EPIC, "kinetics": KINETICS}
