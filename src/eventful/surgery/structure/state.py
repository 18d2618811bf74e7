"""Notices that a model sets or reads attributes of its blocks, which a stream would leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.structure.fingerprint import Fingerprint, KeptFingerprint
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.search import within
from eventful.tokens.layout import TokenLayout


class BlockState:
    """The attributes of those modules of a block whose forward a stream does not call.

    Args:
        tried: the block when it was tried in the model; None if that is not known.
        last: the state when the block was described before.

    Attributes:
        as_tried: whether the block is still as it was then.
        proven: layouts that it was proven for, as it is now.
    """

    def __init__(
        self,
        block: nn.Module,
        recipe: Recipe,
        tried: KeptFingerprint | None,
        last: BlockState | None,
    ) -> None:
        self._called = recipe.called(block)
        self._writes = frozenset(recipe.writes)  # by calls outside a stream
        self._block = block
        outside = {name: module for name, module in block.named_modules() if not self._runs(name)}
        self._held = [vars(module) for module in outside.values()]
        self._ids = self._now()
        now = Fingerprint.of(block)
        self._kept = now.kept()
        same = last is not None and last._kept.fits(now)
        self.proven: set[TokenLayout] = last.proven if last is not None and same else set()
        self.as_tried = tried is not None and tried.fits(now)
        self._state = now.without_weights()

    def _runs(self, name: str) -> bool:
        return runs(self._called, name)

    def _now(self) -> list[list[int]]:
        return [list(map(id, held.values())) for held in self._held]

    def changed(self) -> str | None:
        """The name of an attribute that was set to something else; None without one."""
        if self._now() == self._ids:
            return None
        now = Fingerprint.of(self._block).without_weights()
        changed = (name.partition(":")[0] for name in self._state.differences(now))
        others = (name for name in changed if name not in self._writes)
        return next((name for name in others if not self._runs(name)), None)


def runs(called: Iterable[str], name: str) -> bool:
    """Whether something is part of a module whose own forward runs in a stream."""
    return any(within(name, part) for part in called)


class _NotComputed(Tensor):
    """Stands for a tensor that a block's forward would have set; whatever uses it fails."""

    name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        values = pytree.tree_leaves((args, kwargs))
        name = next(vars(value)["name"] for value in values if isinstance(value, cls))
        raise RuntimeError(f"it reads `{name}`, which its block sets")


class Hidden:
    """Tensors that a block's own forward sets, replaced on a copy of the block that is not run."""

    def __init__(self, block: nn.Module, recipe: Recipe | None) -> None:
        names = () if recipe is None else recipe.writes
        self._places = [place for name in names if (place := written_place(block, name))]
        self._before = [held[attribute] for held, attribute in self._places]
        self._stand_ins = [torch.empty(0).as_subclass(_NotComputed) for _ in self._places]
        for one, (_, attribute) in zip(self._stand_ins, self._places, strict=True):
            vars(one)["name"] = attribute
        self._hide()

    def _hide(self) -> None:
        for (held, attribute), one in zip(self._places, self._stand_ins, strict=True):
            held[attribute] = one

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The block as it was, for a while; what was set meanwhile stays."""
        every = zip(self._places, self._before, self._stand_ins, strict=True)
        for (held, attribute), before, one in every:
            if held.get(attribute) is one:
                held[attribute] = before
        try:
            yield
        finally:
            self._hide()


def written_place(block: nn.Module, name: str) -> tuple[dict[str, Any], str] | None:
    """Where the tensor of a module of a block is kept, by its dotted name; None if it is none."""
    owner, _, attribute = name.rpartition(".")
    holder = dict[str, Foreign](block.named_modules()).get(owner)
    if holder is None:
        return None
    held: dict[str, Any] = holder._buffers if attribute in holder._buffers else holder.__dict__
    return (held, attribute) if isinstance(held.get(attribute), Tensor) else None


def refuse_lost_writes(block: nn.Module, ran: nn.Module, names: Iterable[str]) -> None:
    """Raise `Mismatch` where something that a block's forward sets cannot be hidden in a dry run.

    The model may read it after the block's call, which shows only if a tensor was in its place.

    Args:
        ran: a copy of the block that was run.
        names: of what its run has set.
    """
    for name in names:
        if written_place(block, name) is None:
            later = written_place(ran, name) is not None
            raise Mismatch(
                f"its forward sets `{name}`, which a stream would not do, and the model may read it"
                + (". Run the model once before, so that it is known who does" if later else "")
            )
