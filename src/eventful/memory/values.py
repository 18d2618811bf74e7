"""Memory as values: a write makes a new tensor, so a step is a function of the state before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from eventful.memory.state import RowState, blank
from eventful.tokens.selection import Selection


class ValueState(RowState):
    """The memory of one stream in a step that is exported as a function.

    Tensors that were passed in are never written. `tensors` holds the values after the step. The
    number of slots of a selection is fixed, and nothing is asked of the values.

    Args:
        tensors: the values before the step, (1, ...) each.
        may_be_empty: a selection may hold no token; then nothing is written.
    """

    reversible = False
    in_place: ClassVar[bool] = False

    def __init__(self, tensors: Mapping[str, Tensor], *, may_be_empty: bool = True) -> None:
        super().__init__(1)
        self.tensors = dict(tensors)
        self.frames = [0]
        self.may_be_empty = may_be_empty

    def copy(self, name: str) -> Tensor:
        """See `StreamState`; later writes make other tensors."""
        return self.tensors[name]

    def ensure(self, name: str, like: Tensor) -> None:
        """See `StreamState`."""
        if name not in self.tensors:
            self.tensors[name] = torch.full_like(like, blank(name))

    def fill(self, name: str, value: Tensor, *, owned: bool = False) -> None:
        """See `StreamState`."""
        before = self.tensors.get(name)
        self.tensors[name] = value if before is None else value.to(before.dtype)

    def write(self, name: str, selection: Selection, rows: Tensor, dim: int = 1) -> None:
        """See `StreamState`; a padded slot writes what its twin writes."""
        if selection.is_everything:
            self.fill(name, rows)
            return
        before, index = self.tensors[name][0], selection.index[0]
        values = rows[0].to(before.dtype)
        if self.may_be_empty and selection.count is not None:
            values = torch.where(selection.count > 0, values, before.index_select(0, index))
        self.tensors[name] = before.index_copy(0, index, values)[None]

    def open(self, name: str, selection: Selection | None = None) -> Tensor:
        """See `StreamState`; a copy that stands in for the tensor from now on."""
        self.tensors[name] = self.tensors[name].clone()
        return self.tensors[name]
