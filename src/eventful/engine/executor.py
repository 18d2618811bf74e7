"""What runs the steps of a stream: on the host, or without it on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eventful.budget.base import Told
from eventful.engine.call import Call
from eventful.engine.plan import StepPlan
from eventful.engine.view import ModelView
from eventful.memory.state import StreamState
from eventful.rules.record import StepRecord

Check = Literal["async", "sync"]


@dataclass
class StepResult:
    """What a step left behind.

    Attributes:
        output: of the model.
        record: makes the record of the step.
        ran_model: the model's own code ran, which may have changed its attributes.
        left_out: places in the call of frames that were not finite and were not stepped.
        clock: gives its milliseconds; on a device it waits for the step.
        usual: its time says how long such steps take; the first of a shape take longer.
    """

    output: Any
    record: Callable[[], StepRecord]
    ran_model: bool = True
    left_out: list[int] = field(default_factory=list)
    clock: Callable[[], float] | None = None
    usual: bool = True


class Executor(ABC):
    """Owns the state of some streams, and steps them.

    Attributes:
        state: their memory. `state.reversible` says what happens to a step that fails. Where it
            is, the model is checked before each step, elsewhere while the device is at work.
        check: with `sync` a step waits, and raises its own errors.
    """

    state: StreamState
    check: Check = "async"

    @abstractmethod
    def settle(self) -> None:
        """Read what earlier steps reported; raises if one of them failed."""

    @abstractmethod
    def told(self) -> Told | None:
        """What the last step told, once, as far as `settle` has read it; None where nothing did."""

    def drain(self) -> None:
        """The same, and wait for what is still running."""
        self.settle()

    def add_row(self) -> int:
        """Room for one more stream; returns its row."""
        return self.state.add_row()

    @abstractmethod
    def step(self, rows: Sequence[int], plan: StepPlan, call: Call, view: ModelView) -> StepResult:
        """Step the streams in `rows`.

        A step that raises is undone, or the streams recompute everything next time.
        """

    @abstractmethod
    def finish(self) -> None:
        """Called when the step is over; with check='sync' it waits, and raises as `settle`."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """Forget one stream."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    def flush(self, rows: Sequence[int]) -> None:
        """Recompute everything of these streams at their next frame."""
        for row in rows:
            self.state.frames[row] = -1
