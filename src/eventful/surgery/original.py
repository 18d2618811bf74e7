"""Detects modules that are replaced in the original of a converted model."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from weakref import ref

from torch import nn

_values_of = methodcaller("values")  # scripted modules have no dict
_modules_of = attrgetter("_modules")


class Original:
    """The module tree that a converted model was cloned from.

    Held by weak references, so that it can be garbage-collected.
    """

    def __init__(self, root: nn.Module) -> None:
        self._keep(list(root.modules()))

    def _keep(self, modules: list[nn.Module]) -> None:
        place = {id(module): at for at, module in enumerate(modules)}
        self._modules = [ref(module) for module in modules]
        self._children = [
            -1 if child is None else place[id(child)]
            for module in modules
            for child in module._modules.values()
        ]
        self._counts = [len(module._modules) for module in modules]

    def replaced(self) -> bool:
        """Whether a module was added to, removed from or replaced in the original."""
        modules = [get() for get in self._modules]
        try:
            held = list(map(_modules_of, modules))
        except AttributeError:  # a module was garbage-collected
            return self._replaced_in_part(modules)
        if list(map(len, held)) != self._counts:
            return True
        modules.append(None)  # index -1 means no module
        return list(chain.from_iterable(map(_values_of, held))) != [
            modules[at] for at in self._children
        ]

    def _replaced_in_part(self, modules: list[nn.Module | None]) -> bool:
        """`replaced` where some modules were garbage-collected; compares the others."""
        start = 0
        modules = [*modules, None]
        for module, count in zip(modules[:-1], self._counts, strict=True):
            places = self._children[start : start + count]
            start += count
            if module is None:
                continue
            expected = [modules[at] for at in places]
            # A child that was collected while its parent was not has been replaced.
            if list(module._modules.values()) != expected:
                return True
        self._keep([module for module in modules if module is not None])
        return False
