"""The one place where optional libraries are imported.

Nothing but torch, numpy and safetensors is required, so every other library is imported through
`load`, when it is needed. If it is missing, the error names the extra that installs it.
"""

from __future__ import annotations

import importlib
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
    "typer": "cli",
    "rich": "cli",
    "faster_coco_eval": "eval",
    "tensorboard": "train",
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
