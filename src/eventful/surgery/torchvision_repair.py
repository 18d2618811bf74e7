"""Makes a torchvision that was built for another torch importable.

The torchvision wheels of the Python package index are CUDA builds. Beside a CPU-only torch their
compiled operators do not load, `import torchvision` fails with "operator torchvision::nms does not
exist", and `import timm` and `import transformers` fail with it. Only two operator schemas are
needed at import, so defining them is enough; the operators themselves stay absent.

`import eventful` installs an import finder that does this when torchvision is first imported, by
whatever code. This file must not import torch at its top: `import eventful` does not load torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

TorchvisionState = Literal["ok", "repaired", "broken", "missing"]

_MISSING_OPERATOR = "operator torchvision::nms does not exist"

# A Library removes its schemas when it is garbage-collected; this list keeps ours for good.
_schemas: list[torch.library.Library] = []


class TorchvisionMismatchWarning(RuntimeWarning):
    """torchvision was built for another torch and runs without its compiled operators."""


def repair_torchvision() -> TorchvisionState:
    """Import torchvision, without its compiled operators if those do not load.

    `import eventful` already arranges this for every later import of torchvision. Call it where
    timm or torchvision failed to import before `import eventful`, or to learn the state. Does
    nothing where torchvision works or is not installed, and may be called any number of times.

    Returns:
        `"ok"` (compiled operators present), `"repaired"` (importable, operators absent),
        `"broken"` (fails for another reason: importing it shows which) or `"missing"`.
    """
    install()
    if sys.modules.get("torchvision") is None:
        # Only a real import shows whether the operators load: paths and names of the compiled
        # file differ between versions and platforms.
        try:
            if importlib.util.find_spec("torchvision") is None:
                return "missing"
            if "timm" not in sys.modules:
                _forget_submodules("timm")
            importlib.import_module("torchvision")
        except Exception:
            return "broken"
    extension = sys.modules.get("torchvision.extension")
    return "ok" if extension is not None and extension._has_ops() else "repaired"


def install() -> None:
    """Repair torchvision when it is first imported; may be called any number of times."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchvision by the finders that follow, and adds the repair to its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib`."""
        if name != "torchvision":
            return None
        # Only those that follow: two finders that call each other would never end.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RepairingLoader(spec.loader)
        return spec


class _RepairingLoader(Loader):
    """Runs torchvision's own loader, and once more with the schemas if only those are missing."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib`."""
        # The package keeps its own loader: `inspect` and `importlib.resources` use it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _forget_submodules("torchvision")
        try:
            self._loader.exec_module(module)
        except Exception as error:
            if _MISSING_OPERATOR not in str(error):
                raise
            _define_schemas()
            _forget_submodules("torchvision")
            self._loader.exec_module(module)
            _warn()


def _forget_submodules(package: str) -> None:
    """Drop what a failed import of a package left behind.

    Python forgets a package that failed to import but keeps the submodules that succeeded; the
    next import would find them and never attach them to the new package.
    """
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        del sys.modules[name]


def _define_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(library)


def _warn() -> None:
    import torch

    warnings.warn(
        "torchvision's compiled operators do not match this torch build "
        f"(torch {torch.__version__}); eventful made torchvision importable without them, so its "
        "NMS and RoIAlign are unavailable. To have them, reinstall torch and torchvision from the "
        "same wheel index (both CPU or both the same CUDA): see docs/troubleshooting.md.",
        TorchvisionMismatchWarning,
        stacklevel=3,
    )
