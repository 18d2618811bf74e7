"""What a stream's memory depends on besides parameters: attributes, buffers, the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from eventful.surgery.session import KeptTensor

Volatile = MutableMapping[nn.Module, set[str]]  # attributes that a model's own forward changes
Place = tuple[nn.Module, str]  # a module and the name of one of its attributes

_MOST_ITEMS = 64  # longer containers are data, not settings
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# nn.Module's own bookkeeping (`training` is checked apart), and switches that do not change
# what a stream computes.
_IGNORED = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_gradient_checkpointing_func",
    "_is_hf_initialized",
    "fused_attn",
    "grad_checkpointing",
    "gradient_checkpointing",
}


class Settings:
    """Attributes and buffers of some modules as they are at one moment.

    Watched are plain values (numbers, strings, None, small containers of these), functions,
    tensors that are not parameters, and each module's class with its `forward`. Taken once and
    compared often, so it is kept as flat lists.

    Args:
        volatile: attributes to leave out. `absorb` adds to it.
        fed: modules whose tensors are left out unless they are buffers: someone may hand in
            further inputs there from frame to frame.
    """

    def __init__(
        self, modules: Sequence[nn.Module], volatile: Volatile, fed: Sequence[nn.Module] = ()
    ) -> None:
        self._modules = list(modules)
        self._volatile = volatile
        self._fed = set(fed)
        self._take()

    def _take(self) -> None:
        self._kept = [dict(self._watched(module)) for module in self._modules]
        self._classes = [type(module) for module in self._modules]
        self._kinds = list(set(self._classes))
        self._forwards = [kind.forward for kind in self._kinds]
        self._dicts = [held for m in self._modules for held in (vars(m), m._buffers)]
        self._sizes = list(map(len, self._dicts))
        readers: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        places: list[tuple[dict[str, Any], str]] = []
        self.values: list[Any] = []
        for held, kept in self._by_dict():
            names = [name for name, value in kept.items() if not isinstance(value, Tensor)]
            if names:
                readers.append((itemgetter(*names), held))
                self.values.append(itemgetter(*names)(kept))
            places += [(held, name) for name in kept if isinstance(kept[name], Tensor)]
        self._readers, self._places = readers, places
        self._tensors: list[Tensor] = [held[name] for held, name in places]
        self._addressed = [t for t in self._tensors if _has_address(t)]
        self._pointers = [t.data_ptr() for t in self._addressed]
        self._tracked = [t for t in self._tensors if not t.is_inference()]
        self._versions = [t._version for t in self._tracked]

    def _watched(self, module: nn.Module, also: Container[str] = ()) -> Iterator[tuple[str, Any]]:
        """Names and values to watch; those in `also` whatever they are now."""
        for name, value in _watched(module, self._volatile, also):
            fed = module in self._fed and name not in module._buffers and name not in also
            if not (fed and isinstance(value, Tensor)):
                yield name, value

    def _by_dict(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What is watched, by the dict that holds it."""
        for module, kept in zip(self._modules, self._kept, strict=True):
            buffers = module._buffers
            yield vars(module), {n: value for n, value in kept.items() if n not in buffers}
            yield buffers, {n: value for n, value in kept.items() if n in buffers}

    @property
    def tensors(self) -> list[Tensor]:
        """Buffers and other tensors that are not parameters."""
        return self._tensors

    def kept_tensors(self) -> list[KeptTensor]:
        """The tensors, without keeping them alive, each with its address and count of writes."""
        known = self._memory()
        return [(ref(tensor), *known[id(tensor)]) for tensor in self._tensors]

    def holds(self, kept: Sequence[KeptTensor]) -> bool:
        """Whether these tensors are still the same, and nobody wrote to them."""
        known = self._memory()
        if len(kept) != len(self._tensors):
            return False
        pairs = zip(kept, self._tensors, strict=True)
        return all(get() is t and (at, writes) == known[id(t)] for (get, at, writes), t in pairs)

    def same(self) -> bool:
        """Whether all that is watched is as it was."""
        if self._unchanged():
            return True
        if self.changes():
            return False
        self._take()  # only the number of attributes that are not watched differs
        return True

    def _unchanged(self) -> bool:
        """Whether nothing differs; may be False for attributes that are not watched."""
        try:
            return (
                list(map(len, self._dicts)) == self._sizes
                and [read(held) for read, held in self._readers] == self.values
                and all(map(is_, [held[name] for held, name in self._places], self._tensors))
                and [t.data_ptr() for t in self._addressed] == self._pointers
                and [t._version for t in self._tracked] == self._versions
                and list(map(type, self._modules)) == self._classes
                and [kind.forward for kind in self._kinds] == self._forwards
            )
        except (KeyError, RuntimeError, ValueError):  # gone, or now a tensor or an array
            return False

    def changes(self) -> list[Place]:
        """The attributes that differ."""
        written = {
            id(t)
            for t, version in zip(self._tracked, self._versions, strict=True)
            if t._version != version
        } | {
            id(t)
            for t, pointer in zip(self._addressed, self._pointers, strict=True)
            if t.data_ptr() != pointer
        }
        pairs = zip(self._kinds, self._forwards, strict=True)
        patched = {kind for kind, forward in pairs if kind.forward is not forward}
        found: list[Place] = []
        for module, kept, cls in zip(self._modules, self._kept, self._classes, strict=True):
            now = dict(self._watched(module, kept))
            found += [
                (module, name)
                for name in now.keys() | kept.keys()
                if name not in now
                or name not in kept
                or not _equal(now[name], kept[name])
                or id(kept[name]) in written
            ]
            if type(module) is not cls or cls in patched:
                found.append((module, "__class__"))
        return found

    def absorb(self) -> bool:
        """Stop watching what has changed, because the model's own forward changed it.

        Returns:
            Whether anything had.
        """
        if self._unchanged():
            return False
        for module, name in self.changes():
            self._volatile.setdefault(module, set()).add(name)
        self._take()
        return True

    def agrees(self, other: Settings) -> bool:
        """Whether two saw the same modules with the same values."""
        if [id(m) for m in self._modules] != [id(m) for m in other._modules]:
            return False
        for mine, theirs in zip(self._kept, other._kept, strict=True):
            if not all(_equal(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()):
                return False
        return self._memory() == other._memory() and self._classes == other._classes

    def _memory(self) -> dict[int, tuple[int, int]]:
        pointers = {id(t): p for t, p in zip(self._addressed, self._pointers, strict=True)}
        versions = {id(t): v for t, v in zip(self._tracked, self._versions, strict=True)}
        return {id(t): (pointers.get(id(t), 0), versions.get(id(t), 0)) for t in self._tensors}


def _watched(
    module: nn.Module, volatile: Volatile, also: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Names and values to watch; those in `also` whatever they are now."""
    left_out = volatile.get(module, ())
    for held in (vars(module), module._buffers):
        for name, value in held.items():
            if name in _IGNORED or name in left_out:
                continue
            if isinstance(value, _SCALARS):
                yield name, value
            elif is_plain(value):
                yield name, copy.deepcopy(value)
            elif isinstance(value, Tensor) or _is_function(value) or name in also:
                yield name, value


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def is_plain(value: Any, depth: int = 2) -> bool:
    """Whether a value is a number, a string, None or a small container of these."""
    if isinstance(value, _SCALARS):
        return True
    if depth == 0 or not isinstance(value, dict | list | tuple | set | frozenset):
        return False
    if len(value) > _MOST_ITEMS:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_plain(item, depth - 1) for item in items)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return is_plain(one) and is_plain(other) and bool(one == other)


def _has_address(tensor: Tensor) -> bool:
    """Whether a tensor lies in one piece of memory; sparse ones and some subclasses do not."""
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def plain_settings(module: nn.Module, volatile: Volatile) -> dict[str, str]:
    """Plain attributes of a module and those inside it as text, by name."""
    return {
        f"{path}.{name}".removeprefix("."): repr(value)
        for path, part in module.named_modules()
        for name, value in _watched(part, volatile)
        if is_plain(value) and name in vars(part)
    }
