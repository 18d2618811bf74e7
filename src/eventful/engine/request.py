"""One pass over the streams of a step on a device: what it is given, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventful import ops
from eventful.engine.call import Call
from eventful.engine.plan import ResidentPlan, StepPlan
from eventful.memory.slots import SlotState
from eventful.policies import SelectionParams
from eventful.rules.record import StepRecord
from eventful.surgery.session import Session

PARAMS = 13  # numbers of a stream that a step reads


class StepShape(NamedTuple):
    """What steps share that launch the same kernels on the same addresses."""

    batch: int
    width: int
    rows: int | None
    flush: bool
    dense: bool
    needs: tuple[bool, bool, bool]
    maps: bool
    call: Hashable
    hint: tuple[int, ...] | None
    first_slot: int | None
    precision: Hashable


@dataclass
class StepRequest:
    """One pass over the streams of a step.

    Attributes:
        state: the memory of its streams.
        capture: it may be recorded.
        structure: which modules and parameters the model is made of.
        flush: recompute everything; there may be no memory yet.
        dense: recompute everything, and count the tokens that wanted to pass.
        width: slots of each selection, M.
        rows: of all selections together where they are packed, P; None where they are not.
    """

    session: Session
    plan: StepPlan
    resident: ResidentPlan
    call: Call
    state: SlotState
    capture: bool
    structure: int
    flush: bool = False
    dense: bool = False
    width: int = 0
    rows: int | None = None

    def shape(self) -> StepShape:
        """Which recording serves it."""
        first = self.state.rows[0] if self.state.fixed else None
        hint = None if self.call.motion is None else tuple(self.call.motion.shape)
        return StepShape(
            len(self.state.rows), self.width, self.rows, self.flush, self.dense,
            self.resident.needs, self.plan.maps, self.call.key(), hint, first, self.plan.precision,
        )  # fmt: skip


@dataclass
class Outcome:
    """What a pass left behind.

    Attributes:
        output: of the model.
        record: makes the record, which may never be needed.
        report, sound: see `GateInputs`, as they arrive on the host.
        reported: event after which `report` is there; `sound` is there with the next step's.
        replayed: the pass was recorded work, whose time says what such passes cost.
        whole: the pass can be recorded with all of the model's code; None if that is not known.
    """

    output: Any
    record: Callable[[], StepRecord]
    report: Tensor
    sound: Tensor
    reported: Any
    replayed: bool = False
    whole: bool | None = None


@dataclass(frozen=True)
class HostBuffers:
    """Host memory that a step's numbers travel through, pinned where there is a device to reach.

    Attributes:
        params: (PARAMS, B) slot, turn, cap, floor; level, low, whether these are relative,
            whether cap and floor are of a pool, renewal, k, momentum, inertia, whether it follows
            the noise.
        numbers: the same memory as an array.
        report, sound: see `GateInputs`.
        reported: event after which the report is there; None where nothing is waited for.
    """

    params: Tensor
    numbers: Any
    report: Tensor
    sound: Tensor
    reported: Any

    @classmethod
    def make(cls, batch: int, device: torch.device) -> HostBuffers:
        """Room for B streams."""
        pinned = device.type == "cuda"
        params = torch.zeros(PARAMS, batch, dtype=torch.float64, pin_memory=pinned)
        report = torch.zeros(batch, ops.REPORT, dtype=torch.int32, pin_memory=pinned)
        sound = torch.zeros(batch, dtype=torch.bool, pin_memory=pinned)
        event = torch.cuda.Event() if pinned else None
        return cls(params, params.numpy(), report, sound, event)

    def write(self, state: SlotState, params: Sequence[SelectionParams]) -> None:
        """Write down the streams' slots, turns and policies."""
        for stream, (slot, frames, one) in enumerate(
            zip(state.rows, state.frames, params, strict=True)
        ):
            noise = one.noise or (0.0, 0.0, 0.0)
            follows = one.noise is not None
            self.numbers[:, stream] = (
                slot, frames + 1, one.cap, one.floor, one.level, one.low, one.relative,
                one.shared, one.renewal, *noise, follows,
            )  # fmt: skip
