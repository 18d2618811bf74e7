"""What is recorded of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eventful import ops
from eventful.config import Config
from eventful.cost.counting import (
    BlockShape,
    BlockWork,
    Operations,
    count_block,
    count_dense,
    count_frame_gate,
    count_motion,
    count_positions,
)
from eventful.tokens.layout import TokenLayout

STALE = 0.125  # estimates above it mark an output as stale


@dataclass
class GateRecord:
    """What one gate did in one step.

    Attributes:
        counts: (B,) tokens that passed.
        error: (B, N) error norms, if asked for; None on a flush.
        mask: (B, N) tokens that passed, if asked for.
        wanted: (B,) tokens that wanted to pass, before any ceiling; None where they all did.
    """

    counts: Tensor
    error: Tensor | None = None
    mask: Tensor | None = None
    wanted: Tensor | None = None


@dataclass
class BlockRecord:
    """What one block did in one step: the numbers that counting needs, per stream (B,)."""

    shape: BlockShape
    work: dict[str, Tensor]


@dataclass
class HeadWork:
    """What one layer of a head that keeps its maps did in one step.

    Attributes:
        macs: operations of one pixel or token.
        pixels: of one frame.
        computed: (B,) how many of them were computed.
    """

    macs: int
    pixels: int
    computed: Tensor


@dataclass
class StepRecord:
    """What one step did. Numbers are worked out when asked for, not while the step runs.

    Attributes:
        flushed: (B,) streams that recomputed everything.
        gates: by full name, in the order they were passed.
        blocks: by name.
        positions: (N, D) of each trunk that adds a position encoding to its tokens.
        frame_gates: (N, D) of each gate of gating `frame`.
        carried: (h*w, D, tensors) of each trunk whose memory moves with the picture.
        layouts: token layout by trunk.
        estimates: (B,) estimated error of each stream's output in millionths, negative where it is
            not known; None where nothing is estimated.
        heads: by head and layer, what heads that keep their maps did; their operations are not
            among `macs`, which are the paper's.
        fallback: the step ran dense because so many tokens had changed that this was cheaper, or to
            find out whether it is, or for the `reason` given.
        reason: why every frame of the stream runs dense, whatever changed; None elsewhere.
    """

    config: Config
    flushed: list[bool]
    layouts: dict[str, TokenLayout] = field(default_factory=dict)
    gates: dict[str, GateRecord] = field(default_factory=dict)
    blocks: dict[str, BlockRecord] = field(default_factory=dict)
    positions: dict[str, tuple[int, int]] = field(default_factory=dict)
    frame_gates: list[tuple[int, int]] = field(default_factory=list)
    carried: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    heads: dict[str, dict[str, HeadWork]] = field(default_factory=dict)
    estimates: Tensor | None = None
    fallback: bool = False
    reason: str | None = None
    clock: Callable[[], float] = field(default=lambda: 0.0, repr=False)

    def __repr__(self) -> str:
        """What a person wants to know; on a GPU it waits for the step."""
        count, notes = len(self.flushed), []
        if any(self.flushed):
            some = "" if all(self.flushed) else f" {sum(self.flushed)} of {count}"
            notes.append(f"flushed{some}")
        if self.fallback:
            notes.append(f"fallback: {self.reason or 'dense was cheaper'}")
        if self.blocks and self.gates:
            updated, tokens = self.updated, next(iter(self.blocks.values())).shape.tokens
            mean = sum(updated.values()) / len(updated)
            notes.append(f"{mean:.4g} of {tokens} tokens updated")
            notes.append(f"{self.macs / max(self.dense_macs, 1):.0%} of the operations")
        if ms := self.ms:
            notes.append(f"{ms:.3g} ms")
        return f"StepRecord({', '.join([_count(count, 'stream'), *notes])})"

    @property
    def ms(self) -> float:
        """Milliseconds of the forward call that made this record."""
        return self.clock()

    @property
    def updated(self) -> dict[str, float]:
        """Tokens updated per gate, the mean over streams."""
        return {name: float(gate.counts.float().mean()) for name, gate in self.gates.items()}

    @property
    def wanted(self) -> float | None:
        """Tokens that wanted to pass the first gate, before any ceiling; the mean over streams.

        None where a flush did not count them. Special and due tokens are among them.
        """
        first = next(iter(self.gates.values()), None)
        if first is None or (all(self.flushed) and first.wanted is None):
            return None
        return float((first.counts if first.wanted is None else first.wanted).float().mean())

    @property
    def estimate(self) -> float | None:
        """Estimated relative error of the output against the dense model's, of the worst stream.

        0 after a dense step; None where it is not known.
        """
        if all(self.flushed):
            return 0.0
        if self.estimates is None:
            return None
        worst = int(self.estimates.max())
        return None if worst < 0 else worst / ops.UNIT

    @property
    def stale(self) -> bool:
        """Whether the estimated error is so large that the output should not be relied on."""
        return (self.estimate or 0.0) > STALE

    @property
    def at_ceiling(self) -> bool:
        """Whether more tokens wanted to pass the first gate than were let through."""
        first = next(iter(self.gates.values()), None)
        if first is None or first.wanted is None or all(self.flushed):
            return False
        return bool((first.wanted > first.counts).any())

    @property
    def fraction(self) -> float:
        """Share of tokens updated, the mean over gates and streams."""
        tokens = sum(block.shape.tokens for block in self.blocks.values()) / max(
            len(self.blocks), 1
        )
        updated = self.updated
        return sum(updated.values()) / max(len(updated), 1) / max(tokens, 1)

    @property
    def error(self) -> Tensor | None:
        """(B, N) error norms at the first gate, if maps were asked for."""
        return next((gate.error for gate in self.gates.values()), None)

    @property
    def mask(self) -> Tensor | None:
        """(B, N) tokens that passed the first gate, if maps were asked for."""
        return next((gate.mask for gate in self.gates.values()), None)

    @property
    def waiting(self) -> int:
        """Rows of attention whose recomputation waits for the next steps (rule `exact`)."""
        return sum(int(block.work["waiting"].sum()) for block in self.blocks.values()
                   if "waiting" in block.work)  # fmt: skip

    @property
    def macs(self) -> int:
        """Operations of the step over all streams, in the paper's convention."""
        return sum(operations.total for operations in self.operations())

    @property
    def dense_macs(self) -> int:
        """What the same frames would have cost dense, with the same pooling."""
        total = self._positions()
        for record in self.blocks.values():
            total = total + count_dense(record.shape)
        return total.total * len(self.flushed)

    @property
    def head_macs(self) -> int:
        """Operations over all streams of the heads that keep their maps (docs/heads.md)."""
        return sum(work.macs * int(work.computed.sum()) for work in self._head_works())

    @property
    def dense_head_macs(self) -> int:
        """What the same heads would have cost dense."""
        return sum(work.macs * work.pixels for work in self._head_works()) * len(self.flushed)

    def _head_works(self) -> list[HeadWork]:
        return [work for layers in self.heads.values() for work in layers.values()]

    def operations(self) -> list[Operations]:
        """Operations of this step for each stream."""
        return [self._operations_of(stream) for stream in range(len(self.flushed))]

    def _operations_of(self, stream: int) -> Operations:
        total = self._positions()
        flush = self.flushed[stream]
        for record in self.blocks.values():
            numbers = {name: int(value[stream]) for name, value in record.work.items()}
            work = BlockWork(**numbers, flush=flush)
            total = total + count_block(record.shape, self.config, work)
        if not flush:
            for tokens, dim in self.frame_gates:
                total = total + count_frame_gate(tokens, dim)
            for numbers_of in self.carried.values():
                total = total + count_motion(*numbers_of)
        return total

    def _positions(self) -> Operations:
        total = Operations()
        for tokens, dim in self.positions.values():
            total = total + count_positions(tokens, dim)
        return total


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_records(parts: list[StepRecord], places: Tensor) -> StepRecord:
    """The records of passes over some streams each as one; `places` puts the streams in order."""

    def join(values: list[Tensor]) -> Tensor:
        return torch.cat(values).index_select(0, places)

    def join_maps(values: list[Tensor | None]) -> Tensor | None:
        like = next((value for value in values if value is not None), None)
        if like is None:
            return None
        # A pass that flushed has no errors: not a number.
        sizes = [len(part.flushed) for part in parts]
        return join(
            [
                like.new_full((size, *like.shape[1:]), torch.nan) if value is None else value
                for value, size in zip(values, sizes, strict=True)
            ]
        )

    first = parts[0]
    flushed = [flag for part in parts for flag in part.flushed]
    gates = {
        name: GateRecord(
            join([part.gates[name].counts for part in parts]),
            join_maps([part.gates[name].error for part in parts]),
            join_maps([part.gates[name].mask for part in parts]),
            join([_wanted(part.gates[name]) for part in parts]),
        )
        for name in first.gates
    }
    blocks = {
        name: BlockRecord(
            block.shape,
            {key: join([part.blocks[name].work[key] for part in parts]) for key in block.work},
        )
        for name, block in first.blocks.items()
    }
    heads = {
        head: {
            name: replace(work, computed=join([part.heads[head][name].computed for part in parts]))
            for name, work in layers.items()
        }
        for head, layers in first.heads.items()
        if all(head in part.heads for part in parts)
    }
    gated = next((p.frame_gates for p in parts if p.frame_gates), [])
    carried = next((p.carried for p in parts if p.carried), {})
    return replace(
        first,
        flushed=[flushed[i] for i in places.tolist()],
        gates=gates,
        blocks=blocks,
        heads=heads,
        frame_gates=gated,
        carried=carried,
        estimates=join([_estimates(part) for part in parts]),
        fallback=any(part.fallback for part in parts),
        clock=lambda: sum(part.ms for part in parts),
    )


def _estimates(record: StepRecord) -> Tensor:
    """The estimates of a pass: none after a flush, not known where nothing estimates."""
    if record.estimates is not None:
        return record.estimates
    like = next(iter(record.gates.values())).counts
    return torch.full_like(like, 0 if all(record.flushed) else -1)


def _wanted(gate: GateRecord) -> Tensor:
    return gate.counts if gate.wanted is None else gate.wanted


def counts_in(record: StepRecord) -> list[Tensor]:
    """Every tensor of counts in a record, once."""
    found = [gate.counts for gate in record.gates.values()]
    found += [gate.wanted for gate in record.gates.values() if gate.wanted is not None]
    found += [] if record.estimates is None else [record.estimates]
    found += [value for block in record.blocks.values() for value in block.work.values()]
    found += [work.computed for work in record._head_works()]
    return list({id(tensor): tensor for tensor in found}.values())


def record_of(
    kept: StepRecord,
    counts: list[Tensor],
    numbers: Tensor,
    heads: dict[str, dict[str, HeadWork]] | None = None,
) -> StepRecord:
    """The record of a step that was replayed.

    Args:
        kept: of the step that was recorded.
        counts: its tensors of counts.
        numbers: (len(counts), B) what they held after the replay.
        heads: work of heads that ran after the replay; None where they are part of it.
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
    estimates = None if kept.estimates is None else row[id(kept.estimates)]
    replayed = {
        head: {name: replace(work, computed=row[id(work.computed)]) for name, work in works.items()}
        for head, works in kept.heads.items()
    }
    return replace(
        kept,
        flushed=list(kept.flushed),
        gates=gates,
        blocks=blocks,
        heads=replayed if heads is None else heads,
        estimates=estimates,
    )
