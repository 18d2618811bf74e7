"""Fine-tuning ViViT's temporal model on the outputs of a frozen eventful spatial model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful import files
from eventful.config import Accumulate, Config
from eventful.errors import CheckpointError, ConfigError
from eventful.models.loading import load_model
from eventful.models.saving import save_model
from eventful.models.vivit import ViViT
from eventful.paper.data import EPIC_VIEWS, VideoSet, ViewPlan, open_dataset
from eventful.paper.data.problems import OnProblem, stop
from eventful.paper.evaluate.metrics import RecognitionScore, average_views, top_k
from eventful.paper.train.engine import LoopOptions, StepProgress, Trainer
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import EPIC, Recipe
from eventful.paper.train.vectors import Cached, VectorCache, vector_folder, weights_digest
from eventful.policies import TopR

# Section 5.2: each variant is tested at the r it was tuned for, and at 20 % and 40 % less and more.
BUDGETS = (0.6, 0.8, 1.0, 1.2, 1.4)


@dataclass(frozen=True)
class TemporalPlan:
    """What to train on, and under which update rule.

    Attributes:
        data: folder of the dataset.
        cache: folder for the vectors of the spatial model.
        r: tokens updated per step; None keeps the spatial model dense.
        preset: the update rule.
        accumulate: precision of A·v where the rule updates it by deltas; half, as in the authors'
            configs.
        train_views: views of a training video. A step takes all of them, and averages their logits.
        val_views: views of a validation video, averaged.
        double_softmax: take the softmax of the averaged logits ahead of the cross entropy, which
            takes a softmax itself. The authors' code does this; it flattens the loss.
        budgets: shares of `r` to score at when trained.
    """

    data: str | Path
    cache: Path
    r: int | None
    preset: str = "paper"
    accumulate: Accumulate = "half"
    train_split: str = "train"
    val_split: str = "validation"
    train_views: ViewPlan = EPIC_VIEWS
    val_views: ViewPlan = EPIC_VIEWS
    double_softmax: bool = False
    budgets: tuple[float, ...] = BUDGETS
    cache_dtype: torch.dtype = torch.float32

    def config(self, share: float = 1.0) -> Config | None:
        """The update rule at a share of r."""
        if self.r is None:
            return None
        made = Config.preset(self.preset, TopR(self.budget(share)))
        by_deltas = made.attention in ("delta", "delta-av")
        return replace(made, accumulate=self.accumulate) if by_deltas else made

    def budget(self, share: float) -> int:
        """A share of r in whole tokens."""
        if self.r is None:
            raise ConfigError("A dense spatial model has no r to take a share of.")
        return round(self.r * share)


class TemporalObjective(nn.Module):
    """The trained part of ViViT; its forward pass returns the loss."""

    def __init__(self, model: ViViT, dropout: float, *, double_softmax: bool = False) -> None:
        super().__init__()
        self.temporal, self.classifier = model.temporal, model.classifier
        self.dropout, self.double_softmax = nn.Dropout(dropout), double_softmax

    def logits(self, vectors: Tensor) -> Tensor:
        """(..., V, steps, D) to (..., V, classes), in float32."""
        views = vectors.flatten(0, -3)
        out: Tensor = self.classifier(self.dropout(self.temporal(views)))
        return out.float().unflatten(0, vectors.shape[:-2])

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Cross entropy of the mean logits over the views.

        Args:
            batch: vectors (B, V, steps, D) and labels (B,).
        """
        vectors, labels = batch
        scores = self.logits(vectors).mean(dim=1)
        if self.double_softmax:
            scores = scores.softmax(dim=-1)
        return {"class": F.cross_entropy(scores, labels)}


class VectorExamples:
    """Cached videos, each with all its views."""

    def __init__(self, cached: Sequence[Cached], views: int) -> None:
        self.cached, self.views, self.epoch = cached, views, 0

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        video = self.cached[index]
        return video.views(self.views), video.label


def collate(examples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Examples as a batch."""
    vectors, labels = zip(*examples, strict=True)
    return torch.stack(vectors), torch.tensor(labels)


@torch.no_grad()
def score_vectors(
    objective: TemporalObjective, cached: Sequence[Cached], views: int, processes: Processes
) -> RecognitionScore:
    """Top-1 and top-5 of cached videos, logits averaged over views."""
    objective.eval()
    device = processes.device
    mine = [
        (number, average_views(objective.logits(video.views(views).to(device))).cpu(), video.label)
        for number, video in enumerate(cached)
        if number % processes.world == processes.rank
    ]
    every = sorted(
        (entry for part in processes.gather(mine) for entry in part), key=lambda entry: entry[0]
    )
    if not every:
        return RecognitionScore(float("nan"), float("nan"), 0)
    labels = torch.tensor([entry[2] for entry in every])
    return top_k(torch.stack([entry[1] for entry in every]), labels)


@dataclass(frozen=True)
class TemporalResult:
    """A tuned model and its scores at each budget.

    Attributes:
        scores: for each share of r: r, and top-1 and top-5; before and after tuning.
        skipped: videos that could not be read, and why.
    """

    model: ViViT
    scores: list[dict[str, Any]]
    skipped: list[str]


OnCached = Callable[[str, int, int], None]


class TemporalTuning:
    """The paper's protocol on one dataset: cache, tune, score at several budgets.

    Args:
        on_cached: called with what is being cached, videos done and videos to do.
    """

    def __init__(
        self,
        plan: TemporalPlan,
        weights: Path,
        processes: Processes,
        *,
        workers: int = 2,
        on_problem: OnProblem = stop,
        on_cached: OnCached = lambda what, done, count: None,
    ) -> None:
        model = load_model(weights)
        if not isinstance(model, ViViT):
            raise CheckpointError(
                f"{weights} holds a {type(model).__name__}; give the weights of a ViViT."
            )
        self.plan, self.processes, self.workers, self.on_cached = (
            plan,
            processes,
            workers,
            on_cached,
        )
        self.model = model
        self.train_videos = self._open(plan.train_split, on_problem)
        self.val_videos = self._open(plan.val_split, on_problem)
        self.skipped: list[str] = []

    def _open(self, split: str, on_problem: OnProblem) -> VideoSet:
        videos = open_dataset(self.plan.data, split, on_problem=on_problem)
        if videos.task != "action":
            raise ConfigError(f"{self.plan.data} is {videos.format}, which has no action labels.")
        if len(videos.classes) != self.model.config.classes:
            raise ConfigError(
                f"{videos.format} has {len(videos.classes)} classes, the model "
                f"{self.model.config.classes}: give the weights of this dataset."
            )
        return videos

    def vectors(self, videos: VideoSet, views: ViewPlan, share: float = 1.0) -> list[Cached]:
        """The cached videos of a split at a share of r."""
        config = self.plan.config(share)
        folder = vector_folder(self.plan.cache, videos.split, config)
        cache = VectorCache(folder, self.model, config, views, self.plan.cache_dtype)
        what = f"{videos.split}, " + ("dense" if config is None else f"r = {_r(config)}")
        cached = cache.fill(
            videos,
            self.processes,
            workers=self.workers,
            on_video=lambda done, count: self.on_cached(what, done, count),
        )
        self.skipped += [line for line in cache.skipped() if line not in self.skipped]
        return cached

    def run(
        self,
        folder: Path,
        recipe: Recipe = EPIC,
        options: LoopOptions | None = None,
        on_step: Callable[[StepProgress], None] = lambda _: None,
    ) -> TemporalResult:
        """Train or resume, score, and write `model.safetensors` and `scores.json`."""
        plan, processes = self.plan, self.processes
        train = self.vectors(self.train_videos, plan.train_views)
        val = self.vectors(self.val_videos, plan.val_views)
        objective = TemporalObjective(
            self.model, recipe.dropout, double_softmax=plan.double_softmax
        ).to(processes.device)
        shares = plan.budgets if plan.r is not None else (1.0,)
        scores = [self._scored(objective, 1.0, "before", val)]
        trainer = Trainer(
            objective,
            VectorExamples(train, len(plan.train_views)),
            recipe,
            folder,
            processes,
            collate=collate,
            about={
                "spatial": weights_digest(self.model.spatial),
                "rule": None if plan.r is None else plan.config().to_dict(),  # type: ignore[union-attr]
                "videos": [len(train), len(val)],
                "views": [len(plan.train_views), len(plan.val_views)],
                "loss": _loss(plan),
            },
            validate=lambda: _shares(score_vectors(objective, val, len(plan.val_views), processes)),
            options=options,
        )
        trainer.on_step = on_step
        position = trainer.fit()
        if position.epoch < recipe.epochs:
            return TemporalResult(self.model.eval(), [], self.skipped)
        scores += [self._scored(objective, share, "after", val) for share in shares]
        if processes.first:
            save_model(self.model, folder / "model.safetensors")
            files.write_json(folder / "scores.json", scores)
        return TemporalResult(self.model.eval(), scores, self.skipped)

    def _scored(
        self, objective: TemporalObjective, share: float, when: str, val: list[Cached]
    ) -> dict[str, Any]:
        views = self.plan.val_views
        cached = val if share == 1.0 else self.vectors(self.val_videos, views, share)
        score = score_vectors(objective, cached, len(views), self.processes)
        r = None if self.plan.r is None else self.plan.budget(share)
        return {"tuning": when, "share": share, "r": r, **_shares(score), "videos": score.videos}


def _loss(plan: TemporalPlan) -> str:
    """How the loss follows from the views, for the settings of a run."""
    softmax = "softmax of the " if plan.double_softmax else ""
    return f"cross entropy of the {softmax}mean logits of all views"


def _shares(score: RecognitionScore) -> dict[str, float]:
    return {"top1": score.top1, "top5": score.top5}


def _r(config: Config) -> int:
    assert isinstance(config.policy, TopR)
    return config.policy.r


def views_of(model: ViViT, data_format: str) -> ViewPlan:
    """The paper's views of a dataset at the size of a model."""
    stride = 2 if data_format == "kinetics" else 1
    return replace(EPIC_VIEWS, frames=model.config.frames, stride=stride, size=model.config.size)
