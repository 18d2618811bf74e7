"""Whether anything but the next block sees a block's output, by a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from eventful.surgery.adapter import Mismatch
from eventful.surgery.outputs import first_tensor
from eventful.surgery.structure.dryrun import Recipes, as_returned, twin_of
from eventful.surgery.structure.fingerprint import Fingerprint
from eventful.surgery.structure.passed import reads_tokens
from eventful.surgery.structure.randomness import same_random_state
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.state import Hidden


def loop_is_plain(
    frames: nn.Module, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether a call of the part that takes frames passes each block's output to the next alone.

    Args:
        names: of the blocks, relative to `frames`.

    Raises:
        Mismatch: the call sets something on a block.
    """
    known = Recipes({name: frames.get_submodule(name) for name in names})
    twin = twin_of(frames, [names])
    watch = _Watch(len(names))
    for at, name in enumerate(names):
        block = twin.get_submodule(name)
        vars(block)["forward"] = _Watched(watch, block, known.found.get(name), at)
    # The model may write into what it gets.
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), kwargs))
    with same_random_state(), torch.no_grad(), watch:
        result = twin(*args, **kwargs)
    kept = any(output() is not None for output in watch.outputs)
    del result
    if watch.state is not None:
        raise Mismatch(f"the model sets `{watch.state}` of a block when it is called like this")
    return watch.plain and not kept and watch.next == len(names)


@dataclass
class _Watched:
    """Stands for the block at a place in the list."""

    watch: _Watch
    block: nn.Module
    recipe: Recipe | None
    at: int

    def __post_init__(self) -> None:
        self.before = Fingerprint.of(self.block)
        self.hidden = Hidden(self.block, self.recipe)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the block takes, return what it returns."""
        watch, tokens = self.watch, first_tensor((*args, *kwargs.values()))
        if self.recipe is None:  # it runs as it is, and may do anything with its tokens
            watch.plain = False
            return type(self.block).forward(self.block, *args, **kwargs)
        assert tokens is not None
        known = watch.outputs[-1]() if watch.outputs else None
        watch.plain &= watch.next == self.at and (self.at == 0 or tokens is known)
        watch.next = self.at + 1
        watch.inside = True
        with self.hidden.shown():
            watch.state = watch.state or self.before.difference(Fingerprint.of(self.block))
        made = tokens.clone()
        watch.inside = False
        if watch.next < watch.count:
            watch.outputs.append(ref(made))
        return as_returned(made, self.recipe.returns)


class _Watch(TorchFunctionMode):
    """Notes where an output of a block, but for the last one's, is used outside the next block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.plain = True
        self.next = 0
        self.inside = False
        self.state: str | None = None
        self.outputs: list[ref[Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside and reads_tokens(func):
            known = {id(output()) for output in self.outputs} - {id(None)}
            values = [*args, *kwargs.values()]
            flat = [e for v in values for e in (v if isinstance(v, tuple | list) else [v])]
            self.plain &= not any(id(value) in known for value in flat)
        return func(*args, **kwargs)
