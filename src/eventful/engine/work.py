"""One shape of step: where it reads and writes, its recording, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.engine.graphs import Blocks, Tape
from eventful.memory.slots import SlotState
from eventful.policies import Dials
from eventful.rules.record import BlockRecord, GateRecord, StepRecord


@dataclass
class Work:
    """The fixed places of one shape of step, and its recording once there is one."""

    frame: Tensor
    dials: Tensor  # (8, B) slot, turn, cap; level, k, momentum, inertia, follows the noise
    report: Tensor
    sound: Tensor
    uses: int = 0
    refused: bool = False
    asks: bool | None = None  # the rest of the model cannot be recorded; None until known
    blocks: Blocks | None = None  # where the blocks alone are recorded
    tape: Tape | None = None
    result: Any = None
    record: StepRecord | None = None
    numbers: Tensor | None = None  # every count of the record in one tensor
    counts: list[Tensor] = field(default_factory=list)  # those of the recorded step


@dataclass
class Outcome:
    """What a step left behind.

    Attributes:
        result: the model's output.
        record: makes the record, which nobody may ask for.
        report, sound: see `Resident`, as they arrive on the host.
        told: event after which `report` is there; `sound` is there with the next step's.
        replayed: the step was recorded work, whose time says what such steps cost.
        whole: the step can be recorded with all of the model's code; None if that is not known.
    """

    result: Any
    record: Callable[[], StepRecord]
    report: Tensor
    sound: Tensor
    told: Any
    replayed: bool = False
    whole: bool | None = None


@dataclass(frozen=True)
class HostPlaces:
    """Host memory that a step's numbers travel through, pinned where there is a device to reach.

    Attributes:
        dials: (8, B), see `Work`.
        numbers: the same memory as an array.
        report, sound: see `Resident`.
    """

    dials: Tensor
    numbers: Any
    report: Tensor
    sound: Tensor

    @classmethod
    def make(cls, batch: int, device: torch.device) -> HostPlaces:
        """Room for B streams."""
        pinned = device.type == "cuda"
        dials = torch.zeros(8, batch, dtype=torch.float64, pin_memory=pinned)
        report = torch.zeros(batch, ops.REPORT, dtype=torch.int32, pin_memory=pinned)
        sound = torch.zeros(batch, dtype=torch.bool, pin_memory=pinned)
        return cls(dials, dials.numpy(), report, sound)

    def set_dials(self, state: SlotState, dials: Sequence[Dials]) -> None:
        """Write down the streams' slots, turns and policies."""
        for stream, (slot, frames, dial) in enumerate(
            zip(state.rows, state.frames, dials, strict=True)
        ):
            noise = dial.noise or (0.0, 0.0, 0.0)
            follows = dial.noise is not None
            self.numbers[:, stream] = (slot, frames + 1, dial.cap, dial.level, *noise, follows)


def places_for(frame: Tensor, batch: int) -> Work:
    """Fixed places for frames like `frame` of B streams."""

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=frame.device)

    return Work(
        frame=torch.empty_like(frame, memory_format=torch.contiguous_format),
        dials=make(8, batch, dtype=torch.float64),
        report=make(batch, ops.REPORT, dtype=torch.int32),
        sound=make(batch, dtype=torch.bool),
    )


_streams: dict[Any, Any] = {}  # by the numbers torch knows them by


def current_stream(device: torch.device) -> Any:
    """The current CUDA stream; None on other devices.

    `torch.cuda.current_stream` makes a new object at every call, which takes as long as several
    launches.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    numbers = torch._C._cuda_getCurrentStream(index)
    if numbers not in _streams:
        _streams[numbers] = torch.cuda.current_stream(device)
    return _streams[numbers]


def mark(stream: Any) -> Any:
    """An event on a CUDA stream; None on a device without streams."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def counts_in(record: StepRecord) -> list[Tensor]:
    """Every tensor of counts in a record, once."""
    found = [gate.counts for gate in record.gates.values()]
    found += [gate.wanted for gate in record.gates.values() if gate.wanted is not None]
    found += [value for block in record.blocks.values() for value in block.work.values()]
    return list({id(tensor): tensor for tensor in found}.values())


def record_of(kept: StepRecord, counts: list[Tensor], numbers: Tensor) -> StepRecord:
    """The record of a step that was replayed.

    Args:
        kept: of the step that was recorded.
        counts: its tensors of counts.
        numbers: (len(counts), B) what they held after the replay.
    """
    row = {id(tensor): numbers[i] for i, tensor in enumerate(counts)}

    def copied(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.clone()

    gates = {
        name: GateRecord(
            row[id(gate.counts)],
            copied(gate.error),
            copied(gate.mask),
            None if gate.wanted is None else row[id(gate.wanted)],
        )
        for name, gate in kept.gates.items()
    }
    blocks = {
        name: BlockRecord(block.shape, {k: row[id(v)] for k, v in block.work.items()})
        for name, block in kept.blocks.items()
    }
    return replace(kept, flushed=list(kept.flushed), gates=gates, blocks=blocks)
