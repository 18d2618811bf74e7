"""Notices that a model sets something on its blocks, which a stream would leave out."""

from __future__ import annotations

from torch import nn

from eventful.surgery.adapter import Mismatch
from eventful.surgery.structure.fingerprint import Fingerprint
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.search import within


class BlockState:
    """The attributes of those modules of a block whose forward a stream does not call.

    Raises:
        Mismatch: one of them has a hook, which would not run.
    """

    def __init__(self, block: nn.Module, recipe: Recipe) -> None:
        called = recipe.called()
        self._block = block
        outside = {
            name: module
            for name, module in block.named_modules()
            if not any(within(name, part) for part in called)
        }
        for name, module in outside.items():
            if name and (module._forward_hooks or module._forward_pre_hooks):
                raise Mismatch(f"its `{name}` has a hook, which a stream would not run")
        self._held = [vars(module) for module in outside.values()]
        self._ids = self._now()
        self._state = Fingerprint.of(block)

    def _now(self) -> list[list[int]]:
        return [list(map(id, held.values())) for held in self._held]

    def changed(self) -> str | None:
        """The name of an attribute that was set to something else; None without one."""
        if self._now() == self._ids:
            return None
        return self._state.difference(Fingerprint.of(self._block), weights=False)
