"""What every engine offers: the graphs of one folder, and the memory of single streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eventful.export.manifest import Manifest, dtype_of
from eventful.export.pure import Numbers
from eventful.memory.state import blank

EXTRA = (
    "step.report",
    "step.index",
    "step.count",
    "step.score",
)  # outputs of a step between leaves and state


@dataclass(frozen=True, eq=False)
class Made:
    """What a graph returned besides the state.

    Attributes:
        leaves: tensors of the model's output.
        report: numbers of one stream, see `pure.Parts`.
        index: tokens that were updated; None where all were.
        score: (N,) what tokens were ranked by; None where all were updated.
    """

    leaves: list[Tensor]
    report: list[int]
    index: Tensor | None = None
    score: Tensor | None = None


class Memory(ABC):
    """The state of one stream.

    Attributes:
        state: tensors by their names in the library's state, as graphs take them.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.state = {
            one.name: torch.full(one.shape, blank(one.name), dtype=dtype_of(one.dtype))
            for one in manifest.state
        }

    @abstractmethod
    def flush(self, frame: Tensor) -> Made:
        """Recompute everything; entries that are optional stay."""

    @abstractmethod
    def step(self, frame: Tensor, numbers: Numbers, width: int) -> Made:
        """Run the step with `width` slots."""

    def read(self) -> dict[str, Tensor]:
        """Copies of the tensors."""
        return {name: value.clone() for name, value in self.state.items()}

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replace tensors; each stays where it is in memory."""
        for name, value in tensors.items():
            self.state[name].copy_(value)


class Engine(ABC):
    """The graphs of a folder, loaded."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None) -> None:
        self.folder, self.manifest, self.threads = folder, manifest, threads

    @abstractmethod
    def memory(self) -> Memory:
        """Room for one more stream."""
