"""A step in two passes: streams that recompute everything, and the others, which stay cheap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful.engine.call import Call
from eventful.errors import UnsupportedError
from eventful.memory.state import StreamState
from eventful.rules.record import StepRecord, join_records


@dataclass(frozen=True)
class Passes:
    """The streams of each pass of one step, by their place in the call.

    Attributes:
        rows: streams that flush, then the others.
        order: for each stream its place among those of the first pass, then of the second.
    """

    rows: tuple[list[int], list[int]]
    device: torch.device

    @property
    def order(self) -> list[int]:
        """For each stream its place among those of the first pass, then of the second."""
        every = [*self.rows[0], *self.rows[1]]
        return sorted(range(len(every)), key=every.__getitem__)

    def join(self, results: list[Any]) -> Any:
        """The outputs of the two passes as one, streams in their order."""
        order = self.order
        if all(
            _is_list_of(result, len(rows)) for result, rows in zip(results, self.rows, strict=True)
        ):
            every = [entry for result in results for entry in result]  # a detector's, by frame
            return [every[place] for place in order]
        places = torch.tensor(order, device=self.device)
        sizes = [len(rows) for rows in self.rows]
        layered = _layers_first(results[0])

        def join(first: Any, second: Any) -> Any:
            if _is_tensor_each(first, sizes[0]) and _is_tensor_each(second, sizes[1]):
                both = [*first, *second]
                return type(first)(both[place] for place in order)
            if not isinstance(first, Tensor):
                return first
            axis = 1 if id(first) in layered else 0
            if first.dim() <= axis or [first.shape[axis], second.shape[axis]] != sizes:
                raise UnsupportedError(
                    "Some streams of the batch recompute everything in a pass of their own, but "
                    f"the model returns a tensor {tuple(first.shape)} without one row per stream. "
                    "Step streams that join on their own first: batch(frame, streams=(name,))."
                )
            return torch.cat([first, second], dim=axis).index_select(axis, places)

        return pytree.tree_map(join, *results, is_leaf=lambda v: _is_tensor_each(v, sizes[0]))

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
    return Passes((late, rest), call.frame.device)


def _is_list_of(value: Any, size: int) -> bool:
    """Whether a result is a list with one entry per stream that is not itself tensors."""
    if not isinstance(value, list) or len(value) != size:
        return False
    return not any(isinstance(entry, Tensor | tuple | list) for entry in value)


def _layers_first(result: Any) -> set[int]:
    """Ids of the tensors (layers, streams, ...) of a result.

    Detectors of transformers return what each layer of their decoder computed under such names.
    """
    named = result.items() if isinstance(result, Mapping) else ()
    return {id(value) for name, value in named if str(name).startswith("intermediate_")}


def _is_tensor_each(value: Any, size: int) -> bool:
    """Whether a part of a result is a list with one tensor per stream, as image tokens are.

    Not a list of tensors with a row per stream, as the outputs of layers are.
    """
    if type(value) not in (list, tuple) or len(value) != size:
        return False
    tensors = all(isinstance(entry, Tensor) and entry.dim() for entry in value)
    return tensors and not all(len(entry) == size for entry in value)
