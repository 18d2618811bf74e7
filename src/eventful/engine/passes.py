"""A step in two passes: streams that recompute everything, and the others, which stay cheap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful.engine.call import Call
from eventful.errors import UnsupportedError
from eventful.memory.state import StreamState
from eventful.rules.record import StepRecord, join_records

# Kept where both passes give the same.
_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, Enum)


@dataclass(frozen=True)
class Passes:
    """The streams of each pass of one step, by their place in the call.

    Attributes:
        rows: streams that flush, then the others.
        order: for each stream its place among those of the first pass, then of the second.
        features: the method called gives image tokens, which may be a list with a tensor for each
            stream.
    """

    rows: tuple[list[int], list[int]]
    device: torch.device
    features: bool = False

    @property
    def order(self) -> list[int]:
        """For each stream its place among those of the first pass, then of the second."""
        every = [*self.rows[0], *self.rows[1]]
        return sorted(range(len(every)), key=every.__getitem__)

    def join(self, results: list[Any]) -> Any:
        """The outputs of the two passes as one, streams in their order.

        Raises:
            UnsupportedError: a part of the output cannot be joined; the message names it.
        """
        return self._join("", results[0], results[1])

    def _join(self, name: str, first: Any, second: Any, axis: int = 0) -> Any:
        """A part of the output; `axis` is that of the streams in its tensors."""
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return self._join_tensors(name, first, second, axis)
        if self._one_each(name, first, second):
            both = [*first, *second]
            return type(first)(both[place] for place in self.order)
        parts, spec = _parts(first)
        others, same = _parts(second)
        if type(first) is not type(second) or spec != same:
            raise self._refusal(name, f"{_shown(first)} and {_shown(second)}")
        if spec.is_leaf():
            if isinstance(first, _SIMPLE) and first == second:
                return first
            raise self._refusal(name, f"{_shown(first)} and {_shown(second)}")
        names = list(first) if isinstance(first, Mapping) else list(range(len(parts)))
        joined = [
            self._join(f"{name}[{key!r}]", part, other, 1 if _layers_first(key) else 0)
            for key, part, other in zip(names, parts, others, strict=True)
        ]
        return pytree.tree_unflatten(joined, spec)

    def _join_tensors(self, name: str, first: Tensor, second: Tensor, axis: int) -> Tensor:
        if [_rows(first, axis), _rows(second, axis)] != self._sizes:
            raise self._refusal(name, _shown(first))
        places = torch.tensor(self.order, device=first.device)
        return torch.cat([first, second], dim=axis).index_select(axis, places)

    def _one_each(self, name: str, first: Any, second: Any) -> bool:
        """Whether a part is a list with one entry per stream."""
        if type(first) not in (list, tuple) or type(first) is not type(second):
            return False
        sizes = self._sizes
        if [len(first), len(second)] != sizes:
            return False
        if sizes[0] != sizes[1]:  # its length follows the streams
            return True
        entries = [*first, *second]
        if not any(isinstance(entry, Tensor | tuple | list) for entry in entries):
            return type(first) is list  # a detector's, by frame
        if not self.features or not all(isinstance(entry, Tensor) for entry in entries):
            return False
        # Image tokens are a list with (tokens, channels) of each stream, outputs of layers one of
        # tensors with a row per stream.
        with_rows = [_rows(entry) == sizes[0] for entry in entries]
        if any(with_rows) and not all(with_rows):
            raise self._refusal(name, f"{len(first)} tensors, of which only some have such rows")
        return not any(with_rows) and len({entry.shape[1:] for entry in entries}) == 1

    @property
    def _sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    def _refusal(self, name: str, what: str) -> UnsupportedError:
        entry = f"the entry {name} of the model's output" if name else "the model's output"
        return UnsupportedError(
            "Some streams of the batch recompute everything in a pass of their own, and "
            f"{entry} does not have one row per stream: {what}. Step streams that join on their "
            "own first: batch(frame, streams=(name,))."
        )

    def join_records(self, records: list[StepRecord]) -> StepRecord:
        """The records of the two passes as one."""
        return join_records(records, torch.tensor(self.order, device=self.device))


def split_flushes(state: StreamState, call: Call) -> Passes | None:
    """The passes of a step in which only some streams flush; None where one pass does.

    A call with arguments beside the frame cannot be split: they may hold a row per stream.
    """
    if min(state.frames) >= 0 or max(state.frames) < 0 or not call.divisible:
        return None
    late = [i for i, frames in enumerate(state.frames) if frames < 0]
    rest = [i for i, frames in enumerate(state.frames) if frames >= 0]
    return Passes((late, rest), call.frame.device, call.method.startswith("get_"))


def _parts(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """What a container holds, one level deep, and how to make it again; a leaf holds itself."""
    return pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)


def _rows(tensor: Tensor, axis: int = 0) -> int | None:
    return tensor.shape[axis] if tensor.dim() > axis else None


def _layers_first(name: Any) -> bool:
    """Whether an entry holds tensors (layers, streams, ...).

    Detectors of transformers return what each layer of their decoder computed under such names.
    """
    return isinstance(name, str) and name.startswith("intermediate_")


def _shown(value: Any) -> str:
    """A part of an output in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if isinstance(value, _SIMPLE) else f"a {type(value).__name__}"
