"""Options that several commands share, each declared once, and groups of them.

A group is a dataclass whose fields are options. A command under `grouped` takes it as one argument,
and the command line shows its fields.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


class Dtype(StrEnum):
    """Types that weights, or the forward pass of training, may have."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
MODEL_HELP = (
    "detector, actions, focus, timm:NAME, hf:NAME (a class, a model type, a config, a folder, or "
    "OWNER/NAME), torchvision:NAME, a .safetensors file of this package, or module.path:function."
)
ModelWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="A .safetensors file (or one of tensors by torch.save), or `pretrained` to fetch the "
        "published ones. Random if not given.",
    ),
]
SIZE = (
    "Of the frames that the model gets, in pixels: 480x640, 518 for a square, or longest:518 for "
    "the shape of the picture."
)
FrameSize = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="HxW",
        help=SIZE,
    ),
]
Side = Annotated[int | None, typer.Option(min=1, help="Side of the frames in pixels.")]
FramesPerVideo = Annotated[
    int | None, typer.Option(min=1, help="Only so many frames of each video.")
]
Views = Annotated[str, typer.Option(help="Temporal x spatial views of each video.")]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Let processes of Ray do the work, here or on a cluster.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The cluster's head, or auto; implies --ray."),
]
Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Also measure torch.compile of dense.")
]
CompileMode = Annotated[
    str,
    typer.Option(
        help="Mode of torch.compile; usually default on a CPU, max-autotune-no-cudagraphs on a GPU."
    ),
]


@dataclass(frozen=True)
class Evaluated:
    """What `eventful evaluate vitdet` and `vivit` evaluate."""

    data: Annotated[
        Path,
        typer.Option(help="Folder of the dataset, a COCO-style JSON file, or world:street?..."),
    ]
    weights: Annotated[
        list[str],
        typer.Option(metavar="[NAME=]FILE", help="From eventful.save_model or `weights convert`."),
    ]
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, fast, exact, paper, tokenwise, stgt or skip; several may be given."
        ),
    ] = None
    r: Annotated[
        list[str] | None,
        typer.Option(
            "--r", metavar="R", help="Tokens to update, 768 or 12%; several may be given."
        ),
    ] = None
    h: Annotated[
        list[float] | None, typer.Option("--h", help="Threshold on the error in place of r.")
    ] = None
    size: Side = None


@dataclass(frozen=True)
class Evaluation:
    """How every command of `eventful evaluate` runs."""

    split: Annotated[str | None, typer.Option(help="Split; default: the one to evaluate on.")] = (
        None
    )
    videos: Annotated[int | None, typer.Option(min=1, help="Only the first videos, so many.")] = (
        None
    )
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes, each with its own videos. Default: 1; on Ray as many as fit.",
            show_default=False,
        ),
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each process.")] = None
    ray: OnRay = False
    ray_address: RayAddress = None
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: one GPU after another for the workers.")
    ] = "cpu"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for results; needed to resume.")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with what is in the folder, or not.")
    ] = True
    as_json: Json = False


@dataclass(frozen=True)
class Benchmarked:
    """Models, presets and machines that `eventful bench` compares."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Benchmark models, which --list shows, or any model that `run` takes.",
        ),
    ] = None
    weights: ModelWeights = None
    size: FrameSize = None
    preset: Annotated[
        list[str] | None, typer.Option("--preset", help="Preset to measure; may be repeated.")
    ] = None
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu (the default), cuda, cuda:1, ...; may be repeated."),
    ] = None
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option("--dtype", help="Type of the weights, float32 by default; may be repeated."),
    ] = None


@dataclass(frozen=True)
class Sizes:
    """Budgets and batches that `eventful bench` compares."""

    r: Annotated[
        list[int] | None, typer.Option("--r", min=0, help="Tokens to update; may be repeated.")
    ] = None
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Streams stepped together; may be repeated."),
    ] = None


@dataclass(frozen=True)
class Timing:
    """How `eventful bench` times."""

    frames: Annotated[
        int | None,
        typer.Option(min=2, help="Steady frames to time; usually 12 on a CPU, 40 on a GPU."),
    ] = None
    compiled: Compiled = True
    compile_mode: CompileMode = ""


@dataclass(frozen=True)
class TimedSystems:
    """How `eventful bench runtime` times the paper's systems."""

    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu"
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.float32
    frames: Annotated[
        int | None,
        typer.Option(min=1, help="Steady frames of ViTDet; usually 6 on a CPU, 30 on a GPU."),
    ] = None
    views: Annotated[str, typer.Option(help="Of a video of ViViT, temporal x spatial.")] = "4x3"
    streams: Annotated[int, typer.Option(min=1, help="Videos that a detector steps together.")] = 1
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="base=FILE or vivit=FILE; random if not given."),
    ] = None
    compiled: Compiled = True
    compile_mode: CompileMode = ""


Labels = Annotated[
    list[Path] | None,
    typer.Option(file_okay=False, help="A MOTChallenge sequence to run on, too; may be repeated."),
]
HeadFile = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, help="Head of `benchmarks.mot15`, for average precision on --labels."
    ),
]


@dataclass(frozen=True)
class Filmed:
    """What `eventful bench video` runs on what."""

    clips: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CLIP]...",
            help="Video files, folders of pictures, stress:NAME, or stress:NAME:FILE.",
        ),
    ] = None
    model: Annotated[str, typer.Option(metavar="MODEL", help="As for `eventful run`.")] = (
        "vit_small_patch14_dinov2"
    )
    weights: ModelWeights = None
    labels: Labels = None
    head: HeadFile = None
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SPEC",
            help="Another config: former, fast:TopFraction(0.12), a .toml; may be repeated.",
        ),
    ] = None
    size: Annotated[
        str,
        typer.Option(
            metavar="HxW",
            help=SIZE,
        ),
    ] = ""
    frames: Annotated[int, typer.Option(min=3, help="At most so many of each clip.")] = 96


@dataclass(frozen=True)
class Filming:
    """How `eventful bench video` measures."""

    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu"
    precision: Annotated[Dtype, typer.Option(help="Type of weights and frames.")] = Dtype.float32
    timed: Annotated[
        bool, typer.Option("--time/--no-time", help="Measure times, or quality alone.")
    ] = True
    compiled: Compiled = True
    compile_mode: CompileMode = ""
    seed: Annotated[int, typer.Option(help="Of the stress clips.")] = 0


@dataclass(frozen=True)
class Calibrated:
    """What `eventful calibrate` compares on what."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `eventful run`.")]
    videos: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VIDEO...",
            help="Video files, folders of pictures, stress:NAME, or stress:NAME:FILE.",
        ),
    ] = None
    weights: ModelWeights = None
    labels: Labels = None
    head: HeadFile = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SPEC",
            help="Measure this in place of the usual settings: default, TopFraction(0.12), "
            "fast:TopR(64),max_age=32, skip:8, a .toml; may be repeated.",
        ),
    ] = None
    preset: Annotated[
        str, typer.Option(help="Update rule of the settings: fast, exact, paper, ...")
    ] = "fast"
    per_gate: Annotated[
        bool,
        typer.Option(
            "--per-gate", help="Tune thresholds, one per gate and one for all: --preset paper."
        ),
    ] = False
    size: Annotated[
        str,
        typer.Option(
            metavar="HxW",
            help=SIZE,
        ),
    ] = ""
    frames: Annotated[int, typer.Option(min=1, help="At most so many of each video.")] = 64


@dataclass(frozen=True)
class Limited:
    """What the setting that `eventful calibrate` recommends may lose and cost."""

    error: Annotated[
        float | None,
        typer.Option(
            help="Largest relative error, which 90 % of frames stay within. Default: 0.1, if no "
            "other limit is given."
        ),
    ] = None
    operations: Annotated[
        float | None, typer.Option(help="Largest share of the dense operations, e.g. 0.2.")
    ] = None
    speed: Annotated[
        float | None, typer.Option(help="At least so many times faster than dense, e.g. 2.")
    ] = None


@dataclass(frozen=True)
class Written:
    """What `eventful calibrate` writes."""

    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for JSON, picture and policy file."),
    ] = None
    policy: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="The recommended config as TOML; default: OUT/policy.toml."
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True)
class TrainingFiles:
    """What `eventful train` reads and writes."""

    data: Annotated[
        Path, typer.Option(help="Folder of the dataset (eventful data check), or world:street?...")
    ]
    weights: Annotated[
        Path,
        typer.Option(
            dir_okay=False, help="Where to start: by eventful.save_model or `weights convert`."
        ),
    ]
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the run; one that was stopped goes on.")
    ]


@dataclass(frozen=True)
class RecipeChanges:
    """What replaces the values of a published recipe; None keeps them."""

    epochs: Annotated[int | None, typer.Option(min=1, help="Default: as published.")] = None
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step over all processes; as published.")
    ] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; as published.")] = None
    weight_decay: Annotated[
        float | None, typer.Option(min=0, help="Weight decay; as published.")
    ] = None
    clip: Annotated[float | None, typer.Option(help="Longest gradient; default: none.")] = None
    precision: Annotated[Dtype, typer.Option(help="Mixed precision where not float32.")] = (
        Dtype.float32
    )
    seed: Annotated[int, typer.Option(help="Of order, augmentation and dropout.")] = 0

    def changes(self) -> dict[str, Any]:
        """As values that a checkpoint can hold."""
        return {**vars(self), "precision": self.precision.value}


@dataclass(frozen=True)
class TrainingRun:
    """How `eventful train` runs; nothing that changes the trained weights."""

    device: Annotated[
        str, typer.Option(help="cpu or cuda; torchrun gives each process its own.")
    ] = "cpu"
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Also save every so many steps, not only every epoch.")
    ] = None
    workers: Annotated[
        int, typer.Option(min=0, help="Processes or threads that prepare samples.")
    ] = 2
    strict: Annotated[
        bool,
        typer.Option("--strict/--skip", help="Stop at a missing or malformed entry, or skip it."),
    ] = True
    as_json: Json = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options as single arguments."""
    groups: dict[str, Any] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, own in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(own.annotation):
            groups[name] = own.annotation
            parameters |= {option.name: option for option in _options(own.annotation)}
        else:
            parameters[name] = own.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{option.name: given.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in parameters.items()}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    """The fields of a group as parameters of a function."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=hints[option.name],
        )
        for option in fields(group)
    ]
