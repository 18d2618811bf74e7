"""Optional libraries: imported when they are needed, with torchvision repaired first.

`eventful.extras` has the table of them, and the errors for missing ones.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from eventful import extras
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
    "openvino_core",
    "repair_torchvision",
]

# Import name of a library -> the extra of this package that installs it.
EXTRAS = extras.by_library()

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
    if name.partition(".")[0] in _USES_TORCHVISION:
        repair_torchvision()
    return extras.require(name)


@cache
def openvino_core() -> Any:
    """The core of OpenVINO, one for this process and as long as it.

    Each core gives the thread a stack for signals, and puts back the one before when it ends. Of
    two cores the first may end first. Then the second puts back a stack that is gone, and the next
    ctrl-C is a segmentation fault.
    """
    return load("openvino").Core()


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
    return extras.install_line(EXTRAS[library])
