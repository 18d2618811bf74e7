"""Old names of modules: importing one gives the module at its new place, and warns once."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "adapters": "surgery.adapters",
    "adapters.base": "surgery.adapter",
    "adapters.libraries": "surgery.libraries",
    "attention": "rules.attention",
    "batch": "stream",
    "block": "rules.block",
    "conversion": "surgery.conversion",
    "counting": "cost.counting",
    "counting_models": "cost.models",
    "data": "paper.data",
    "evaluate": "paper.evaluate",
    "footprint": "cost.footprint",
    "gating": "rules.gate",
    "layout": "tokens.layout",
    "models.layouts": "models.key_formats",
    "paper.train.export": "models.saving",
    "relative": "rules.relative",
    "selection": "tokens.selection",
    "slots": "memory.slots",
    "snapshot": "memory.snapshot",
    "spec": "rules.spec",
    "state": "memory.state",
    "step": "rules.step",
    "train": "paper.train",
    "windows": "rules.windows",
}


def new_name(name: str) -> str | None:
    """Where a module of this full name is now; None if it did not move."""
    package, _, rest = name.partition(".")
    if package != "eventful":
        return None
    parts = rest.split(".")
    for length in range(len(parts), 0, -1):
        found = MOVED.get(".".join(parts[:length]))
        if found is not None:
            return ".".join(["eventful", found, *parts[length:]])
    return None


class _Loader(Loader):
    """Gives out a module that is there under another name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at its new place."""
        module = importlib.import_module(self._target)
        self._spec = module.__spec__  # the import system is about to replace it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to run."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Finds modules under their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib`."""
        found = new_name(name)
        if found is None:
            return None
        warnings.warn(
            f"{name} is now {found}; import it from there.", DeprecationWarning, stacklevel=2
        )
        return spec_from_loader(name, _Loader(found))


def install() -> None:
    """Make the old names importable; any number of times."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # ahead of folders left behind by an old version
