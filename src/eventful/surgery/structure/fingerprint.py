"""What a block's result may depend on besides its weights: classes, settings, buffers."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from eventful.surgery.clones import own_forward

T = TypeVar("T")

_SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    Enum,
    type,
)
# nn.Module's own bookkeeping; a block is tried in evaluation mode.
_LEFT_OUT = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_is_hf_initialized"}
_DEPTH = 6  # of objects inside objects
_MOST_ALIKE = 256
_DROPOUT = "drop"  # in a class name: does nothing in evaluation mode, whatever its probability


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The state of a module at one moment, to be compared with later ones.

    Attributes:
        plain: names and values; of tensors, shapes and dtypes.
        tensors: by name, each with the count of writes to it.
        objects: by name, compared by identity: functions, and what has no known content.
        weights: names of those of `tensors` that are parameters.
    """

    plain: tuple[tuple[str, Any], ...]
    tensors: dict[str, tuple[Any, int]]
    objects: dict[str, Any]
    weights: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Fingerprint:
        """Of a module and the modules inside it."""
        walk = _Walk()
        for name, part in module.named_modules():
            walk.module(name, part)
        return cls(tuple(walk.plain), walk.tensors, walk.objects, frozenset(walk.weights))

    def difference(self, other: Fingerprint) -> str | None:
        """The name of something that differs; None if all is the same."""
        return next(self.differences(other), None)

    def differences(self, other: Fingerprint) -> Iterator[str]:
        """The names of all that differs."""
        mine, theirs = dict(self.plain), dict(other.plain)
        for name in dict.fromkeys((*mine, *theirs)):
            if name not in mine or name not in theirs or mine[name] != theirs[name]:
                yield name
        for name, (tensor, writes) in self.tensors.items():
            again, later = other.tensors.get(name, (tensor, writes))
            if tensor is again and writes == later:
                continue
            if tensor is again or not _equal(tensor, again):
                yield name
        for name, value in self.objects.items():
            if other.objects.get(name, value) is not value:
                yield name

    def without_weights(self) -> Fingerprint:
        """The same without the parameters, which it then does not keep alive."""
        rest = {name: held for name, held in self.tensors.items() if name not in self.weights}
        return replace(self, tensors=rest)

    def values(self) -> Hashable:
        """A key, the same for modules that differ in their weights and in their objects alone."""
        buffers = tuple(
            (name, _digest(tensor))
            for name, (tensor, _) in self.tensors.items()
            if name not in self.weights
        )
        return self.plain, buffers

    def kept(self) -> KeptFingerprint:
        """To be kept for long: it does not keep the module alive."""
        return KeptFingerprint(
            self.plain,
            [(ref(tensor), writes) for tensor, writes in self.tensors.values()],
            [_weak(value) for value in self.objects.values()],
        )


@dataclass(frozen=True, eq=False)
class KeptFingerprint:
    """A fingerprint with weak references."""

    plain: tuple[tuple[str, Any], ...]
    tensors: list[tuple[ref[Any], int]]
    objects: list[Any]

    def fits(self, now: Fingerprint) -> bool:
        """Whether a module is as it was: the same tensors, not written since."""
        if self.plain != now.plain or len(self.tensors) != len(now.tensors):
            return False
        tensors = zip(self.tensors, now.tensors.items(), strict=True)
        for (get, writes), (name, (tensor, later)) in tensors:
            # The proof does not depend on the values of weights.
            if get() is not tensor or (writes != later and name not in now.weights):
                return False
        return _same_objects(self.objects, now)


class Alike(Generic[T]):
    """Something known about modules that differ in their weights alone; threads may share it."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[Any], T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, now: Fingerprint, key: Hashable = None) -> T | None:
        """What is known; None if nothing is."""
        values = now.values()
        with self._lock:
            objects, found = self._known.get((values, key), ([], None))
        return found if _same_objects(objects, now) else None

    def put(self, now: Fingerprint, found: T, key: Hashable = None) -> None:
        """Keep what was found, without keeping the module alive."""
        values, objects = now.values(), [_weak(value) for value in now.objects.values()]
        with self._lock:
            self._known[values, key] = (objects, found)
            self._known.move_to_end((values, key))
            if len(self._known) > _MOST_ALIKE:
                self._known.popitem(last=False)


def _same_objects(kept: Sequence[Any], now: Fingerprint) -> bool:
    pairs = zip(kept, now.objects.values(), strict=False)
    return len(kept) == len(now.objects) and all(get() is value for get, value in pairs)


@dataclass
class _Walk:
    """Collects what a fingerprint holds."""

    plain: list[tuple[str, Any]] = field(default_factory=list)
    tensors: dict[str, tuple[Any, int]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def module(self, name: str, module: nn.Module) -> None:
        self.plain.append((f"{name}:class", type(module)))
        self.objects[f"{name}:forward"] = type(module).forward
        dot = f"{name}." if name else ""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(module._parameters.get(key), Tensor):
                self.weights.append(dot + key)
            self.value(dot + key, tensor, 0)
        if _DROPOUT in type(module).__name__.lower():
            return
        for key, value in vars(module).items():
            if key not in _LEFT_OUT and not (key == "forward" and own_forward(value)):
                self.value(dot + key, value, 0)

    def value(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _SCALARS):
            self.plain.append((name, (type(value), value)))
        elif isinstance(value, Tensor):
            self.plain.append((name, (Tensor, tuple(value.shape), value.dtype)))
            self.tensors[name] = (value, 0 if value.is_inference() else value._version)
        elif type(value).__module__.partition(".")[0] == "eventful":
            return
        elif id(value) in self.seen or depth > _DEPTH:
            self.plain.append((name, type(value)))
            self.objects[name] = value
        else:
            self._inside(name, value, depth)

    def _inside(self, name: str, value: Any, depth: int) -> None:
        """What is inside a container or an object; modules elsewhere in the model stay closed."""
        self.seen.add(id(value))
        self.plain.append((name, type(value)))
        for key, part in _parts(value):
            self.value(f"{name}.{key}", part, depth + 1)
        if not isinstance(value, list | tuple | dict | set | frozenset | partial):
            self.objects[name] = value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((str(at), part) for at, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "items", tuple(sorted(map(repr, value)))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif hasattr(value, "tobytes"):  # an array of numpy
        yield "content", hashlib.sha1(value.tobytes(), usedforsecurity=False).hexdigest()
    elif not isinstance(value, nn.Module) and not callable(value):
        yield from ((str(key), part) for key, part in getattr(value, "__dict__", {}).items())


def _digest(tensor: Tensor) -> Hashable:
    """A short value for the content of a tensor."""
    try:
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha1(flat.numpy().tobytes(), usedforsecurity=False).hexdigest()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse ones, subclasses, scalars
        return id(tensor), tensor._version


def _equal(one: Tensor, two: Tensor) -> bool:
    try:
        return torch.equal(one, two)
    except (RuntimeError, NotImplementedError):
        return False


def _weak(value: Any) -> Any:
    """A reference that does not keep a value alive; to what cannot have one, it is lost at once."""
    try:
        return ref(value)
    except TypeError:
        return object
