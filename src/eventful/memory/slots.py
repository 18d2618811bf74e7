"""Memory that stays where it is: slots of a pool, one per stream, written in place.

The rows of a pool's tensors are slots. Kernels read and write the rows of the streams they
step by number, so nothing is copied in or out, and work recorded once serves every stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from eventful import ops
from eventful.memory.state import MEMORY, RowState, StreamState, blank, is_optional
from eventful.tokens.selection import Selection


class SlotPool:
    """Tensors by name with one row per slot, shared by the streams of one model and frame shape.

    Attributes:
        generation: grows whenever tensors move or are added, so that recorded work can tell.
        complete: a step has run, so that the tensors its streams need are there.
        added: tensors that were added since. Streams that have memory here lack them, and flush.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.capacity = 0
        self.generation = 0
        self.complete = False
        self.added = 0
        self._free: list[int] = []

    def acquire(self, count: int) -> list[int]:
        """Numbers of `count` free slots; the pool grows where it must."""
        short = count - len(self._free)
        if short > 0:
            self._grow(max(self.capacity + short, 2 * self.capacity if self.capacity > 1 else 1))
        taken, self._free = self._free[:count], self._free[count:]
        for name, tensor in self.tensors.items():
            tensor[taken] = blank(name)
        return taken

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        self._free = sorted({*self._free, *slots})

    @property
    def used(self) -> int:
        """Slots that belong to a stream."""
        return self.capacity - len(self._free)

    def close(self) -> None:
        """Give up all memory."""
        self.tensors.clear()
        self.capacity, self._free = 0, []
        self.complete = False
        self.generation += 1

    def ensure(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make room for a tensor of `shape` per slot, unless it is there."""
        if name in self.tensors:
            return
        self.tensors[name] = torch.full(
            (self.capacity, *shape), blank(name), dtype=dtype, device=device
        )
        if self.complete and not is_optional(name):
            self.added += 1
            self.generation += 1

    def lacks(self, names: Collection[str]) -> bool:
        """Whether a stream with these tensors lacks some that the others have."""
        return any(name not in names and not is_optional(name) for name in self.tensors)

    def _grow(self, capacity: int) -> None:
        for name, tensor in self.tensors.items():
            larger = tensor.new_full((capacity, *tensor.shape[1:]), blank(name))
            larger[: self.capacity] = tensor
            self.tensors[name] = larger
        self._free += range(self.capacity, capacity)
        self.capacity = capacity
        self.generation += 1


class SlotState(StreamState):
    """The memory of B streams in slots of a pool. Writes happen in place and cannot be undone.

    Attributes:
        pool: where the tensors are.
        rows: slot of each stream.
        slots: the same where the kernels read it, set for the length of a step.
        fixed: the step is for these slots alone, which lie in a row.
        good: (B,) streams whose frame was finite, set by the first gate; others are not written.
    """

    reversible = False

    def __init__(self, pool: SlotPool, rows: Sequence[int], frames: Sequence[int]) -> None:
        self.pool = pool
        self.rows = list(rows)
        self.frames = list(frames)
        self.slots: Tensor | None = None
        self.good: Tensor | None = None
        self.fixed = False
        self._keeper: Callable[[], object] | None = None

    @classmethod
    def from_rows(cls, pool: SlotPool, rows: RowState) -> SlotState:
        """Take over the memory of streams that had it to themselves."""
        state = cls(pool, pool.acquire(len(rows)), rows.frames)
        # The rows are handed back when the state is no longer used, whatever they are by then.
        state._keeper = weakref.finalize(state, pool.release, state.rows)
        for name, tensor in rows.tensors.items():
            if not name.endswith("/age"):  # ages are for policies that a resident step cannot run
                pool.ensure(name, tensor.shape[1:], tensor.dtype, tensor.device)
                pool.tensors[name][state.rows] = tensor
        if pool.lacks(rows.tensors):
            state.frames = [-1] * len(state)
        return state

    def release(self) -> None:
        """Hand the slots back to the pool now; the state must not be used any more."""
        if self._keeper is not None:
            self._keeper()

    def detached(self) -> RowState:
        """See `StreamState`."""
        rows = RowState(len(self))
        rows.frames = list(self.frames)
        rows.tensors = {name: tensor[self.rows] for name, tensor in self.pool.tensors.items()}
        return rows

    @property
    def in_a_row(self) -> bool:
        """Whether the slots follow one another."""
        return self.rows == list(range(self.rows[0], self.rows[0] + len(self)))

    def __contains__(self, name: str) -> bool:
        return name in self.pool.tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.pool.tensors[name]
        return tensor[self.rows] if self.slots is None else ops.take_slots(tensor, self.slots)

    def raw(self, name: str) -> Tensor:
        """See `StreamState`."""
        return self.pool.tensors[name]

    def held(self, name: str) -> tuple[Tensor, Tensor | None]:
        """See `StreamState`."""
        if not self.fixed:
            return self.raw(name), self.slots
        return self.raw(name)[self.rows[0] : self.rows[0] + len(self)], None

    def copy(self, name: str) -> Tensor:
        """See `StreamState`."""
        return self[name]

    @property
    def nbytes(self) -> int:
        """Bytes held by these streams."""
        return sum(
            tensor.nbytes // max(self.pool.capacity, 1) * len(self)
            for tensor in self.pool.tensors.values()
        )

    def ensure(self, name: str, like: Tensor) -> None:
        """See `StreamState`."""
        self.pool.ensure(name, like.shape[1:], like.dtype, like.device)

    def added(self, tokens: Tensor, name: str) -> Tensor:
        """See `StreamState`."""
        assert self.slots is not None
        return ops.add_held(tokens, self.raw(name), self.slots)

    def fill(self, name: str, value: Tensor, *, owned: bool = False) -> None:
        """Set a whole tensor, in the streams whose frame is good."""
        self.ensure(name, value)
        assert self.slots is not None
        ops.fill_slots_(self.raw(name), value, self.slots, self.good)

    def renew(self, name: str, rows: Tensor) -> Tensor:
        """See `StreamState`."""
        assert self.slots is not None
        return ops.renew_rows_(self.raw(name), rows, self.slots, self.good)

    def write(self, name: str, selection: Selection, rows: Tensor, dim: int = 1) -> None:
        """Write the selected tokens."""
        self.write_all({name: rows}, selection)

    def write_all(self, rows: Mapping[str, Tensor], selection: Selection) -> None:
        """Write the selected tokens of several buffers in one go."""
        for name, values in rows.items():
            shape = (selection.tokens, values.shape[-1])
            self.pool.ensure(name, shape, values.dtype, values.device)
        index = None if selection.is_everything else selection.index
        buffers = tuple(self.raw(name) for name in rows)
        ops.write_rows_(buffers, tuple(rows.values()), index, selection.count, self.slots)

    def memory(self, gate: str) -> dict[str, Tensor]:
        """See `StreamState`."""
        start = gate + MEMORY
        return {
            name.removeprefix(start): self[name]
            for name in self.pool.tensors
            if name.startswith(start)
        }

    def open(self, name: str, selection: Selection | None = None) -> Tensor:
        """See `StreamState`."""
        return self.raw(name)

    def open_where(self, name: str, changed: Tensor, channels: int, like: Tensor) -> Tensor:
        """See `StreamState`."""
        self.pool.ensure(name, (changed.shape[1], channels), like.dtype, like.device)
        return self.raw(name)

    def accepted(self, changed: Tensor) -> Tensor:
        """See `StreamState`."""
        return changed if self.good is None else changed & self.good[:, None]

    def accept(self, good: Tensor) -> None:
        """See `StreamState`."""
        self.good = good

    def begin(self) -> None:
        """Nothing to prepare: writes are masked, not undone."""

    def commit(self) -> None:
        """See `begin`."""

    def rollback(self) -> None:
        """Nobody knows which writes happened, so everything is recomputed."""
        self.frames = [-1] * len(self.frames)

    def add_row(self) -> int:
        """See `StreamState`."""
        self.rows += self.pool.acquire(1)
        self.frames.append(-1)
        return len(self.frames) - 1

    def drop_row(self, row: int) -> None:
        """See `StreamState`."""
        self.pool.release([self.rows.pop(row)])
        del self.frames[row]

    def take(self, rows: Sequence[int]) -> SlotState:
        """The same slots, for some of the streams."""
        if list(rows) == list(range(len(self))):
            return self
        picked = ([values[row] for row in rows] for values in (self.rows, self.frames))
        return SlotState(self.pool, *picked)

    def put(self, rows: Sequence[int], part: StreamState) -> None:
        """Bring the counts of frames up to date; the memory is in its place already.

        The memory of a state that has rows of its own is copied in.
        """
        for row, frames in zip(rows, part.frames, strict=True):
            self.frames[row] = frames
        if part.reversible:
            held = part.detached().tensors
            if self.pool.lacks(held):
                self.frames = [-1 if row in rows else n for row, n in enumerate(self.frames)]
            for name, tensor in held.items():
                self.pool.ensure(name, tensor.shape[1:], tensor.dtype, tensor.device)
                self.pool.tensors[name][[self.rows[row] for row in rows]] = tensor
