"""Options of `eventful train`. The work is in `train_run`, imported when a command runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.options import Json, RecipeChanges, TrainingFiles, TrainingRun, grouped

train = typer.Typer(
    help="Train the paper's two systems; start a command with torchrun to use several GPUs.",
    no_args_is_help=True,
)


class Freeze(StrEnum):
    """What keeps its weights."""

    nothing = "nothing"
    backbone = "backbone"


class Heads(StrEnum):
    """What reads the regions of a detector."""

    same = "same"
    faster = "faster"


class Sums(StrEnum):
    """Precision of A·v where it is updated by deltas."""

    half = "half"
    float32 = "float32"


@dataclass(frozen=True)
class Frames:
    """What `eventful train vitdet` trains and scores on."""

    split: Annotated[str, typer.Option(help="Split to train on.")] = "train"
    also: Annotated[
        list[str] | None, typer.Option(help="A further split, such as det_train for DET.")
    ] = None
    val_split: Annotated[
        str | None, typer.Option(help="Split to score after each epoch; default: none.")
    ] = None
    val_frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of each of its videos; default: all.")
    ] = None
    frames_per_video: Annotated[
        int, typer.Option(min=0, help="Frames of each training video, 0 for all.")
    ] = 15
    images_per_class: Annotated[
        int, typer.Option(min=0, help="Images of a class from --also splits, 0 for all.")
    ] = 2000


@dataclass(frozen=True)
class Tuning:
    """How a detector is fine-tuned, besides its recipe."""

    size: Annotated[int | None, typer.Option(min=1, help="Side of the frames.")] = None
    heads: Annotated[
        Heads,
        typer.Option(help="Those of the weights, or the paper's Faster R-CNN whatever they have."),
    ] = Heads.same
    freeze: Annotated[Freeze, typer.Option(help="What keeps its weights.")] = Freeze.nothing
    drop_path: Annotated[float, typer.Option(min=0, max=1)] = 0.0
    layer_decay: Annotated[
        float, typer.Option(min=0, max=1, help="Learning rate from block to block.")
    ] = 1.0
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps; default 1000.")] = None
    decay_epoch: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Epoch, from 0, at which the rate falls to a tenth; default 2."),
    ] = None
    flip: Annotated[float, typer.Option(min=0, max=1, help="Chance of mirroring.")] = 0.5
    smallest: Annotated[
        float, typer.Option(min=0, max=1, help="Scale frames by chance from this to 1.")
    ] = 1.0


@dataclass(frozen=True)
class Spatial:
    """The spatial model of `eventful train vivit`."""

    cache: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the spatial model's outputs.")
    ]
    r: Annotated[
        int, typer.Option(min=0, help="Tokens updated per step; 0 for a dense spatial model.")
    ]
    preset: Annotated[str, typer.Option(help="Update rule of the spatial model.")] = "paper"
    accumulate: Annotated[
        Sums, typer.Option(help="Precision of A·v where the rule updates it by deltas.")
    ] = Sums.half


@dataclass(frozen=True)
class Viewed:
    """Videos and views of `eventful train vivit`."""

    train_split: Annotated[str, typer.Option(help="Split to train on.")] = "train"
    val_split: Annotated[
        str | None, typer.Option(help="Split to score on; default: the dataset's own.")
    ] = None
    temporal_views: Annotated[int, typer.Option(min=1, help="Views of a video in time.")] = 4
    spatial_views: Annotated[int, typer.Option(min=1, help="Crops of each of them.")] = 3
    half: Annotated[bool, typer.Option("--half", help="Keep the cache in float16.")] = False


@train.command()
@grouped
def vitdet(
    *,
    files: TrainingFiles,
    frames: Frames,
    tuning: Tuning,
    recipe: RecipeChanges,
    run: TrainingRun,
) -> None:
    """Fine-tune a detector on ImageNet VID (and DET), COCO-style data or MOTChallenge.

    The defaults are the paper's for VID. Layers whose number of classes differs start anew.
    """
    from eventful.cli import train_run
    from eventful.paper.train.detector import DetectorPlan
    from eventful.paper.train.frames import Augment

    changes = {
        **recipe.changes(),
        "warmup": tuning.warmup,
        "decay_epochs": tuple(tuning.decay_epoch) if tuning.decay_epoch else None,
        "layer_decay": tuning.layer_decay,
    }
    plan = DetectorPlan(
        data=files.data,
        split=frames.split,
        also=tuple(frames.also or ()),
        frames_per_video=frames.frames_per_video or None,
        images_per_class=frames.images_per_class or None,
        val_split=frames.val_split,
        val_frames=frames.val_frames,
        size=tuning.size,
        heads=tuning.heads.value,
        freeze=tuning.freeze.value,
        drop_path=tuning.drop_path,
        augment=Augment(tuning.flip, (tuning.smallest, 1.0)),
    )
    train_run.detector(plan, changes, files, run)


@train.command()
@grouped
def vivit(
    *,
    files: TrainingFiles,
    spatial: Spatial,
    viewed: Viewed,
    dropout: Annotated[
        float | None, typer.Option(min=0, max=1, help="Ahead of the classifier; as published.")
    ] = None,
    double_softmax: Annotated[
        bool,
        typer.Option(
            "--double-softmax",
            help="Take a softmax ahead of the loss, which takes one itself, as the authors' code.",
        ),
    ] = False,
    recipe: RecipeChanges,
    run: TrainingRun,
) -> None:
    """Tune ViViT's temporal model to an eventful spatial one, as in the paper.

    Caches the frozen spatial model's outputs, trains on them with the settings published for the
    dataset, every video with all its views, and scores at r and at 20 % and 40 % less and more.
    """
    from eventful.cli import train_run

    plan = {
        "data": files.data,
        "cache": spatial.cache,
        "r": spatial.r or None,
        "preset": spatial.preset,
        "accumulate": spatial.accumulate.value,
        "double_softmax": double_softmax,
        "train_split": viewed.train_split,
        "val_split": viewed.val_split,
    }
    changes = {**recipe.changes(), "dropout": dropout}
    views = (viewed.temporal_views, viewed.spatial_views)
    train_run.temporal(plan, views, viewed.half, changes, files, run)


class Shipped(StrEnum):
    """What `eventful train world` trains."""

    detector = "detector"
    actions = "actions"


@train.command()
def world(
    name: Annotated[Shipped, typer.Argument(help="A detector, or a model of motions.")],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the run; one that was stopped goes on.")
    ],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Save and stop after so long; default: never.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.0, help="Factor on the steps, and below 1 on the scenes scored.")
    ] = 1.0,
    shard: Annotated[
        int, typer.Option(min=1, help="Most MiB of a file of a checkpoint; more make several.")
    ] = 16,
    as_json: Json = False,
) -> None:
    """Train a small detector, or a model of motions, on the generated world.

    Scenes are rendered on the device, so no data is needed. The result is scored on scenes that
    were not trained on.
    """
    from eventful.cli import train_run

    train_run.shipped(name.value, out, device, minutes, scale, shard, as_json)
