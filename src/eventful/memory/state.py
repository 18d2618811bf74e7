"""What videos remember between frames: named tensors, one row per stream."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from eventful import ops
from eventful.tokens.selection import Selection

MEMORY = "/memory/"  # marks values kept by policies
OPTIONAL = (
    MEMORY,
    "/scene",
    "/previous",
    "/moved",
)  # a stream may lack these: NaN, and no need to flush


class StreamState(ABC):
    """The memory of B streams: tensors by a name like `blocks.3/key`.

    Attributes:
        frames: per stream, steps since its last flush; -1 before the first frame.
        slots: (B,) row of the tensors that belongs to each stream; None if row b does.
        reversible: a step that fails is undone bit for bit. Otherwise writes of streams with a bad
            frame are masked, and after a failure everything is recomputed.
        in_place: operations may write to the tensors that `open` gives out. Otherwise a write makes
            a new tensor, see `ValueState`.
    """

    frames: list[int]
    slots: Tensor | None = None
    reversible: ClassVar[bool]
    in_place: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.frames)

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """A tensor (B, ...) with one row per stream."""

    @abstractmethod
    def raw(self, name: str) -> Tensor:
        """A tensor with one row per slot, for operations that take `slots`."""

    @abstractmethod
    def held(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A tensor, and which of its rows belong to the streams; None if row b does to stream b."""

    @abstractmethod
    def copy(self, name: str) -> Tensor:
        """A tensor (B, ...) that later writes do not change."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held by these streams."""

    @abstractmethod
    def added(self, tokens: Tensor, name: str) -> Tensor:
        """Tokens (B, N, D) plus a buffer."""

    @abstractmethod
    def ensure(self, name: str, like: Tensor) -> None:
        """Make room for values like `like` (B, ...), blank, unless it is there."""

    @abstractmethod
    def fill(self, name: str, value: Tensor, *, owned: bool = False) -> None:
        """Set a whole tensor. An `owned` value may be kept as it is, any other is copied."""

    @abstractmethod
    def renew(self, name: str, rows: Tensor) -> Tensor:
        """Set rows (B, N, D) of the kind that is there; returns which differ in any bit, (B, N)."""

    @abstractmethod
    def write(self, name: str, selection: Selection, rows: Tensor, dim: int = 1) -> None:
        """Write the selected entries along the token axis `dim` (a buffer, Section 4.1)."""

    @abstractmethod
    def write_all(self, rows: Mapping[str, Tensor], selection: Selection) -> None:
        """Write the selected tokens of several buffers."""

    @abstractmethod
    def open(self, name: str, selection: Selection | None = None) -> Tensor:
        """The `raw` tensor, for an operation that is about to write to it in place.

        Args:
            selection: tokens that will be written; None for any.
        """

    @abstractmethod
    def open_where(self, name: str, changed: Tensor, channels: int, like: Tensor) -> Tensor:
        """The `raw` tensor (S, P, C), for an operation that is about to write some places of it.

        Args:
            changed: (B, P) places that will be written.
            channels: C; where there is no tensor yet a blank one is made.
            like: has its dtype and device.
        """

    @abstractmethod
    def accepted(self, changed: Tensor) -> Tensor:
        """`changed` (B, P) without the streams that must not be written, see `accept`."""

    @abstractmethod
    def memory(self, gate: str) -> dict[str, Tensor]:
        """What the policies keep at a gate."""

    def keep_memory(self, gate: str, memory: Mapping[str, Tensor]) -> None:
        """Store what the policies keep at a gate."""
        for name, value in memory.items():
            self.fill(f"{gate}{MEMORY}{name}", value, owned=True)

    @abstractmethod
    def accept(self, good: Tensor) -> None:
        """From now on write in the streams (B,) whose frame is good alone."""

    @abstractmethod
    def begin(self) -> None:
        """Start a step."""

    @abstractmethod
    def commit(self) -> None:
        """Keep what was written since `begin`."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo what was written since `begin`, or recompute everything next time."""

    @abstractmethod
    def add_row(self) -> int:
        """Room for one more stream, which will flush on its first frame; returns its row."""

    @abstractmethod
    def drop_row(self, row: int) -> None:
        """Forget one stream; those after it move up."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> StreamState:
        """The state of some of the streams: this one if they are all, in order."""

    @abstractmethod
    def put(self, rows: Sequence[int], part: StreamState) -> None:
        """Write back what `take` gave out."""

    @abstractmethod
    def detached(self) -> RowState:
        """The same memory as tensors of its own."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back now; the state must not be used any more."""


class RowState(StreamState):
    """Row b of every tensor belongs to stream b.

    Between `begin` and `commit` every write leaves what it replaced in a journal, so that
    `rollback` restores the state bit for bit.

    Attributes:
        tensors: by name.
    """

    reversible = True

    def __init__(self, streams: int = 1) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.frames = [-1] * streams
        self._undo: list[Callable[[], None]] | None = None
        self._temporary = ops.TemporaryBuffers()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def raw(self, name: str) -> Tensor:
        """See `StreamState`."""
        return self.tensors[name]

    def held(self, name: str) -> tuple[Tensor, Tensor | None]:
        """See `StreamState`."""
        return self.tensors[name], None

    def copy(self, name: str) -> Tensor:
        """See `StreamState`."""
        return self.tensors[name].clone()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def added(self, tokens: Tensor, name: str) -> Tensor:
        """See `StreamState`."""
        return tokens + self[name]

    def ensure(self, name: str, like: Tensor) -> None:
        """See `StreamState`."""
        if name not in self.tensors:
            self.fill(name, torch.full_like(like, blank(name)), owned=True)

    def fill(self, name: str, value: Tensor, *, owned: bool = False) -> None:
        """See `StreamState`."""
        self._remember(self._restore(name, self.tensors.get(name)))
        kept = value.detach()
        self.tensors[name] = kept if owned else kept.clone(memory_format=torch.contiguous_format)

    def renew(self, name: str, rows: Tensor) -> Tensor:
        """See `StreamState`."""
        changed = ops.differing(rows, self.tensors[name])
        self.fill(name, rows)
        return changed

    def write(self, name: str, selection: Selection, rows: Tensor, dim: int = 1) -> None:
        """See `StreamState`."""
        if selection.is_everything and (name not in self or dim == 1):
            self.fill(name, rows)
        else:
            selection.scatter_(self._open(name, selection, dim), rows.detach(), dim)

    def write_all(self, rows: Mapping[str, Tensor], selection: Selection) -> None:
        """See `StreamState`."""
        for name, values in rows.items():
            self.write(name, selection, values)

    def open(self, name: str, selection: Selection | None = None) -> Tensor:
        """See `StreamState`."""
        if selection is not None:
            return self._open(name, selection, 1)
        self.fill(name, self.tensors[name])
        return self.tensors[name]

    def _open(self, name: str, selection: Selection, dim: int) -> Tensor:
        """A tensor whose selected entries are about to be written."""
        target = self.tensors[name]
        if self._undo is not None and selection.width:
            old = selection.gather(target, dim)
            old = old.clone() if selection.is_everything else old
            self._remember(lambda: selection.scatter_(target, old, dim))
        return target

    def open_where(self, name: str, changed: Tensor, channels: int, like: Tensor) -> Tensor:
        """See `StreamState`."""
        if name not in self.tensors:
            self.fill(name, like.new_full((*changed.shape, channels), blank(name)), owned=True)
            return self.tensors[name]
        if self._undo is None:
            return self.tensors[name]
        target = self.tensors[name].flatten(0, 1)
        places = changed.flatten().nonzero()[:, 0]
        if len(places) == len(target):  # nothing of it stays: cheaper than to keep a copy
            self.fill(name, torch.empty_like(self.tensors[name]), owned=True)
            return self.tensors[name]
        room = self._temporary.take((len(places), target.shape[1]), target)
        old = torch.index_select(target, 0, places, out=room)

        def restore() -> None:
            target.index_copy_(0, places, old)

        self._remember(restore)
        return self.tensors[name]

    def accepted(self, changed: Tensor) -> Tensor:
        """See `StreamState`."""
        return changed

    def memory(self, gate: str) -> dict[str, Tensor]:
        """See `StreamState`."""
        start = gate + MEMORY
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}

    def accept(self, good: Tensor) -> None:
        """A step with a bad frame is undone instead."""

    def begin(self) -> None:
        """Start a step that can be undone."""
        frames = list(self.frames)

        def restore_frames() -> None:
            self.frames = frames

        self._undo = [restore_frames]

    def commit(self) -> None:
        """See `StreamState`."""
        self._undo = None
        self._temporary.release()

    def rollback(self) -> None:
        """Undo what was written since `begin`, last write first."""
        for undo in reversed(self._undo or []):
            undo()
        self._undo = None
        self._temporary.release()

    def add_row(self) -> int:
        """See `StreamState`."""
        for name, tensor in self.tensors.items():
            row = torch.full_like(tensor[:1], blank(name))
            self.tensors[name] = torch.cat([tensor, row])
        self.frames.append(-1)
        return len(self.frames) - 1

    def drop_row(self, row: int) -> None:
        """See `StreamState`."""
        keep = [i for i in range(len(self.frames)) if i != row]
        del self.frames[row]
        if keep:
            self.tensors = {name: tensor[keep] for name, tensor in self.tensors.items()}
        else:
            self.tensors = {}

    def take(self, rows: Sequence[int]) -> RowState:
        """The state of some of the streams: this one if they are all, else a copy."""
        if list(rows) == list(range(len(self))):
            return self
        part = RowState(len(rows))
        part.frames = [self.frames[row] for row in rows]
        part.tensors = {name: tensor[list(rows)] for name, tensor in self.tensors.items()}
        return part

    def put(self, rows: Sequence[int], part: StreamState) -> None:
        """Write back what `take` gave out.

        A tensor that only one side has holds nothing for the streams of the other: they flush.
        """
        if part is self:
            return
        other = part.detached()
        for row, frames in zip(rows, other.frames, strict=True):
            self.frames[row] = frames
        needed = {name for name in self.tensors if not is_optional(name)}
        if {name for name in other.tensors if not is_optional(name)} - needed:
            others = set(range(len(self))) - set(rows)
            self.frames = [-1 if row in others else n for row, n in enumerate(self.frames)]
        if needed - other.tensors.keys():
            self.frames = [-1 if row in rows else n for row, n in enumerate(self.frames)]
        for name, value in other.tensors.items():
            if name not in self.tensors:
                shape = (len(self), *value.shape[1:])
                self.tensors[name] = torch.full(
                    shape, blank(name), dtype=value.dtype, device=value.device
                )
            self.tensors[name][list(rows)] = value
        for name in self.tensors.keys() - other.tensors.keys():
            self.tensors[name][list(rows)] = blank(name)

    def detached(self) -> RowState:
        """See `StreamState`."""
        return self

    def release(self) -> None:
        """Forget everything."""
        self.tensors, self.frames = {}, []

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor, e.g. to move the state to another device."""
        self.tensors = {name: change(tensor) for name, tensor in self.tensors.items()}

    def clear(self) -> None:
        """Forget everything; every stream flushes on its next frame."""
        self.tensors = {}
        self.frames = [-1] * len(self.frames)

    def names(self) -> Iterator[str]:
        """Names of the tensors held."""
        return iter(self.tensors)

    def _remember(self, undo: Callable[[], None]) -> None:
        if self._undo is not None:
            self._undo.append(undo)

    def _restore(self, name: str, old: Tensor | None) -> Callable[[], None]:
        def restore() -> None:
            if old is None:
                self.tensors.pop(name, None)
            else:
                self.tensors[name] = old

        return restore


def is_optional(name: str) -> bool:
    """Whether a stream may lack this tensor: NaN stands for it, and it need not flush."""
    return any(mark in name for mark in OPTIONAL)


def blank(name: str) -> float:
    """What stands where a stream has no value: NaN where NaN means missing, else zero."""
    return math.nan if is_optional(name) else 0.0
