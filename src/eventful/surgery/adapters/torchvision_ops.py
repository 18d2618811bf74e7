"""torchvision's compiled operators, if they load."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType

from eventful.surgery.libraries import TorchvisionMismatchWarning, load, repair_torchvision


@lru_cache(maxsize=1)
def compiled_ops() -> ModuleType | None:
    """`torchvision.ops` with its NMS and RoIAlign; None if they do not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TorchvisionMismatchWarning)
        return load("torchvision.ops") if repair_torchvision() == "ok" else None
