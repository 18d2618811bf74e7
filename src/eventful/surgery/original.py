"""Detects modules replaced, and adapters switched, in the original of a converted model."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from weakref import ref

from torch import nn

_values_of = methodcaller("values")  # scripted modules have no dict
_modules_of = attrgetter("_modules")


# What peft calls the attributes of a layer with adapters that say which of them are in use.
_SWITCH = "_disable_adapters"
_SWITCHES = (_SWITCH, "_active_adapter")


def _switches(module: nn.Module) -> tuple[object, ...]:
    held = vars(module)
    return tuple(list(v) if isinstance(v := held.get(key), list) else v for key in _SWITCHES)


class Original:
    """The module tree that a converted model was cloned from.

    Held by weak references, so that it can be garbage-collected.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._keep(modules)
        self._adapted = [(ref(m), _switches(m)) for m in modules if _SWITCH in vars(m)]
        self._twins: list[ref[nn.Module]] = []

    def pair(self, twin: nn.Module) -> None:
        """Note the converted model, whose adapters are its own."""
        self._twins = [ref(m) for m in twin.modules() if _SWITCH in vars(m)]

    def switched(self) -> bool:
        """Whether adapters (LoRA) were switched in the original, and not in the converted model."""
        for (get, before), twin_of in zip(self._adapted, self._twins, strict=False):
            module, twin = get(), twin_of()
            if module is None or twin is None:
                continue
            now = _switches(module)
            if now != before and now != _switches(twin):
                return True
        return False

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
