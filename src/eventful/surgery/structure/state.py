"""Notices that a model sets or reads attributes of its blocks, which a stream would leave out."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.structure.fingerprint import Fingerprint, KeptFingerprint
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.search import within
from eventful.tokens.layout import TokenLayout


class BlockState:
    """The attributes of those modules of a block whose forward a stream does not call.

    Args:
        tried: the block when it was tried in the model; None if that is not known.

    Attributes:
        as_tried: whether the block is still as it was then.
        proven: layouts that it was proven for, as it is now.

    Raises:
        Mismatch: one of them has a hook, which would not run.
    """

    def __init__(self, block: nn.Module, recipe: Recipe, tried: KeptFingerprint | None) -> None:
        self._called = recipe.called()
        self._block = block
        outside = {name: module for name, module in block.named_modules() if not self._runs(name)}
        for name, module in outside.items():
            if name and (module._forward_hooks or module._forward_pre_hooks):
                raise Mismatch(f"its `{name}` has a hook, which a stream would not run")
        self._held = [vars(module) for module in outside.values()]
        self._ids = self._now()
        now = Fingerprint.of(block)
        self.proven: set[TokenLayout] = set()
        self.as_tried = tried is not None and tried.fits(now)
        self._state = now.without_weights()

    def _runs(self, name: str) -> bool:
        """Whether something is part of a module whose own forward runs in a stream."""
        return any(within(name, part) for part in self._called)

    def _now(self) -> list[list[int]]:
        return [list(map(id, held.values())) for held in self._held]

    def changed(self) -> str | None:
        """The name of an attribute that was set to something else; None without one."""
        if self._now() == self._ids:
            return None
        now = Fingerprint.of(self._block).without_weights()
        changed = (name.partition(":")[0] for name in self._state.differences(now))
        return next((name for name in changed if not self._runs(name)), None)


class _NotComputed:
    """Stands for what a block's forward would have set; whatever reads it fails."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _fail(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"it reads `{self._name}`, which its block sets")

    __bool__ = __len__ = __iter__ = __getitem__ = __getattr__ = _fail
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = __matmul__ = _fail

    def __deepcopy__(self, memo: object) -> None:
        return None  # in a copy that runs, nothing was computed yet


def hide_written(block: nn.Module, recipe: Recipe | None) -> None:
    """Replace what a block's own forward sets, on a copy of the block that is not run."""
    for name in () if recipe is None else recipe.writes:
        owner, _, attribute = name.rpartition(".")
        holder = dict[str, Foreign](block.named_modules()).get(owner)
        if isinstance(holder, nn.Module) and attribute in vars(holder):
            vars(holder)[attribute] = _NotComputed(name)
