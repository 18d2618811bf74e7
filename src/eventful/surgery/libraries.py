"""The one place where optional libraries are imported.

Nothing but torch, numpy and safetensors is required, so every other library is imported through
`load`, late, and a missing one is answered with the extra that brings it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Literal

import torch

from eventful.errors import MissingDependencyError

TorchvisionState = Literal["ok", "repaired", "broken", "missing"]

# Import name of a library -> the extra of this package that installs it.
EXTRAS = {
    "timm": "timm",
    "transformers": "hf",
    "torchvision": "vision",
    "av": "video",
    "PIL": "video",
    "matplotlib": "plot",
    "openvino": "openvino",
    "typer": "cli",
    "rich": "cli",
    "faster_coco_eval": "eval",
    "tensorboard": "train",
}

# Importing one of these imports torchvision.
_USES_TORCHVISION = frozenset({"timm", "transformers", "torchvision"})

# A Library takes its schemas back when it is collected; this list keeps ours for good.
_schemas: list[torch.library.Library] = []


class TorchvisionMismatchWarning(RuntimeWarning):
    """torchvision was built for another torch and runs without its compiled operators."""


def load(name: str) -> ModuleType:
    """Import an optional library, or one of its submodules.

    Args:
        name: Import name, such as `"timm"` or `"timm.models.vision_transformer"`.

    Raises:
        MissingDependencyError: The library, or something it needs, is not installed. The message
            is the command to run.
        ValueError: The library belongs to no extra of this package.
    """
    library = name.partition(".")[0]
    if library not in EXTRAS:
        raise ValueError(f"{library!r} is no optional library of eventful: add it to EXTRAS")
    if library in _USES_TORCHVISION:
        repair_torchvision()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(_explain(name, error)) from error


def install_command(library: str) -> str:
    """The command that installs an optional library through its extra."""
    return f'pip install "eventful-transformers[{EXTRAS[library]}]"'


def repair_torchvision() -> TorchvisionState:
    """Make a torchvision that was built for another torch importable.

    The torchvision wheels of the Python package index are CUDA builds. Beside a CPU-only torch
    their compiled operators do not load, and `import torchvision` then fails with "operator
    torchvision::nms does not exist", taking timm and transformers down with it. Only two operator
    schemas are needed at import, so defining them is enough; the operators themselves stay absent.

    Does nothing where torchvision works or is not installed, and may be called any number of
    times. `load` calls it; call it yourself before importing timm or transformers on your own.

    Returns:
        `"ok"` (compiled operators present), `"repaired"` (importable, operators absent),
        `"broken"` (fails for a reason this cannot mend: importing it shows which) or `"missing"`.
    """
    if sys.modules.get("torchvision") is None:
        # Only a real import tells whether the operators load: paths and names of the compiled
        # file differ between versions and platforms.
        try:
            if importlib.util.find_spec("torchvision") is None:
                return "missing"
            _import_afresh()
        except Exception as error:
            if "operator torchvision::nms does not exist" not in str(error):
                return "broken"
            _define_schemas()
            try:
                _import_afresh()
            except Exception:
                return "broken"
            _warn()
    extension = sys.modules.get("torchvision.extension")
    return "ok" if extension is not None and extension._has_ops() else "repaired"


def _import_afresh() -> None:
    """Import torchvision after dropping what a failed import of it, or of timm, left behind.

    Python forgets a package that failed to import but keeps the submodules that succeeded; the
    next import would find them and never attach them to the new package.
    """
    for root in ("torchvision", "timm"):
        if root not in sys.modules:
            for leftover in [name for name in sys.modules if name.startswith(f"{root}.")]:
                del sys.modules[leftover]
    importlib.import_module("torchvision")


def _define_schemas() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(library)


def _warn() -> None:
    warnings.warn(
        "torchvision's compiled operators do not match this torch build "
        f"(torch {torch.__version__}); eventful made torchvision importable without them, so its "
        "NMS and RoIAlign are unavailable. To have them, reinstall torch and torchvision from the "
        "same wheel index (both CPU or both the same CUDA): see docs/troubleshooting.md.",
        TorchvisionMismatchWarning,
        stacklevel=3,
    )


def _explain(name: str, error: ModuleNotFoundError) -> str:
    library = name.partition(".")[0]
    absent = error.name or library
    command = install_command(library)
    if absent == library:
        return f"{library} is not installed. Install it with: {command}"
    if absent.startswith(f"{library}."):
        return (
            f"the installed {library} has no module {absent}: its version does not fit this "
            f"eventful. Upgrade it with: pip install --upgrade {library}"
        )
    return f"{library} is installed but needs {absent}. Install it with: {command}"
