"""One forward pass inside a stream: what its blocks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from eventful import ops
from eventful.config import Config
from eventful.cost.counting import BlockShape
from eventful.cost.fallback import Demand
from eventful.memory.state import StreamState
from eventful.policies import Policy, SelectionParams, params_of
from eventful.rules.record import BlockRecord, GateRecord, StepRecord
from eventful.rules.spec import BlockSpec
from eventful.tokens.layout import TokenLayout
from eventful.tokens.packing import Packing
from eventful.tokens.selection import Selection

LEADING = ("qkv", "block", "frame")  # kinds that may be the first gate of a trunk


class FlushRequired(Exception):
    """The step needs state that is not there (a newly tapped layer); it is run again as a flush."""


@dataclass
class GateInputs:
    """What the gates of a trunk read in one step, as tensors where its tokens are.

    Attributes:
        turn: (B,) frames since each stream's last flush, this one included.
        level, cap, low, floor: (B,) of each stream's policy, see `ops.PickRule`.
        relative: (B,) whether `level` and `low` are multiples of the contrast of the tokens; None
            if that is so in no stream. `low` and `floor` count only where it is so in some.
        shared: (B,) whether `cap` and `floor` belong to a pool, see `ops.Pool`; None if that is so
            in no stream.
        renewal: (B,) see `SelectionParams`.
        noise: (4, B) k, momentum, inertia and whether it counts, of policies that follow the
            noise; None if no stream has one.
        report: (B, ops.REPORT) int32, see `ops.pick`.
        sound: (B,) whether all outputs were finite; set by the last block.
        width: slots of every selection, M; None for as many as pass.
        rows: rows of all streams together where they are packed, P; None to pad each to M, or,
            without a width, to let the host count them.
        params: of the policies, where the host may use them; None elsewhere.
        own_policies: some policy has no parameters, so that all policies' `select` is called.
        count_wanted: all tokens are updated, and those that wanted to pass are counted first.
        gated: called once the report of the first gate is complete.
    """

    turn: Tensor
    level: Tensor
    cap: Tensor
    low: Tensor
    floor: Tensor
    relative: Tensor | None
    shared: Tensor | None
    renewal: Tensor
    noise: Tensor | None
    report: Tensor
    sound: Tensor
    width: int | None = None
    rows: int | None = None
    params: Sequence[SelectionParams] | None = None
    own_policies: bool = False
    count_wanted: bool = False
    gated: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls, policies: Sequence[Policy], frames: Sequence[int], tokens: int, device: torch.device
    ) -> GateInputs:
        """Of the streams' policies, for a step that may ask the host."""
        found = [params_of(policy, tokens) for policy in policies]
        own = None in found
        params = [SelectionParams(math.inf, 0) if own or one is None else one for one in found]
        noise = None
        if any(one.noise is not None for one in params):
            rows = [(*(one.noise or (0.0, 0.0, 0.0)), one.noise is not None) for one in params]
            noise = torch.tensor(rows, dtype=torch.float32, device=device).T
        relative = None
        if any(one.relative for one in params):
            relative = torch.tensor([one.relative for one in params], device=device)
        shared = None
        if any(one.shared for one in params):
            shared = torch.tensor([one.shared for one in params], device=device)
        return cls(
            turn=torch.tensor(frames, device=device) + 1,
            level=torch.tensor([one.level for one in params], dtype=torch.float32, device=device),
            cap=torch.tensor([one.cap for one in params], device=device),
            low=torch.tensor([one.low for one in params], dtype=torch.float32, device=device),
            floor=torch.tensor([one.floor for one in params], device=device),
            relative=relative,
            shared=shared,
            renewal=torch.tensor([one.renewal for one in params], device=device),
            noise=noise,
            report=torch.zeros(len(params), ops.REPORT, dtype=torch.int32, device=device),
            sound=torch.ones(len(params), dtype=torch.bool, device=device),
            params=None if own else params,
            own_policies=own,
        )


@dataclass(frozen=True, eq=False)
class View:
    """What a trunk's patch embedding saw in a step that follows motion.

    Attributes:
        picture: (B, 8h, 8w) the frame in grey, see `ops.grey_picture`.
        content: (B, h*w, D) its patches, embedded, without positions.
    """

    picture: Tensor
    content: Tensor


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
RunBlock = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Track(Protocol):
    """Takes over the blocks' calls of a step."""

    def block(self, step: Step, spec: Any, call: Arguments, run: RunBlock) -> Any:
        """Stand in for the block of a `BlockSpec`; `run` is the block itself."""
        ...


@dataclass
class Step:
    """One step of B streams.

    Attributes:
        config: the update rule.
        state: the memory of the streams, written as the step goes.
        policies: one per stream.
        flushing: (B,) streams that recompute everything in this step; a scene cut adds to it.
        layouts: token layout by trunk.
        keep_maps: keep error maps and masks in the record.
        dense_if: decides, when the first gate has counted its tokens, whether the step runs dense;
            None for never.
        demand: what it decided by; None where nothing was decided.
        taps: by trunk, blocks whose full output the model's caller will see.
        selections: the frame gate's choice by trunk, for gating `frame`.
        compact: trunks whose blocks now pass only the selected tokens on, with the index (B, M) of
            these, or (1, P) where they are packed.
        unfinished: trunks whose first block was called, and whose last one was not yet.
        packings: of the frame gate's choice by trunk, where its rows are packed.
        cache: values shared by the blocks of one step, e.g. the tokens due for a refresh.
        constants: values that depend on the weights and sizes alone, kept from step to step.
        inputs: what the gates read, by trunk; made from the policies where it is missing.
        hint: (B, 2, y, x) motion that came with the frame, see `rules.motion`; None without.
        views: what the patch embeddings saw, by trunk.
        motions: (B, h, w, 2) where the content of each token was, by trunk, see
            `ops.match_blocks`; none where nothing moved.
        track: takes over the blocks' calls, to record or to replay them; None to run them.
        structure: which modules and parameters the model is made of, see `weights.ModelView`.
    """

    config: Config
    state: StreamState
    policies: list[Policy]
    flushing: list[bool]
    layouts: dict[str, TokenLayout]
    keep_maps: bool = False
    dense_if: Callable[[Demand], bool] | None = None
    demand: Demand | None = None
    taps: dict[str, set[int]] = field(default_factory=dict)
    selections: dict[str, Selection] = field(default_factory=dict)
    compact: dict[str, Tensor] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    packings: dict[str, Packing] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Any, Any] = field(default_factory=dict)
    inputs: dict[str, GateInputs] = field(default_factory=dict)
    hint: Tensor | None = None
    views: dict[str, View] = field(default_factory=dict)
    motions: dict[str, Tensor] = field(default_factory=dict)
    track: Track | None = None
    structure: int | None = None

    def __post_init__(self) -> None:
        self.record = StepRecord(self.config, self.flushing, self.layouts)

    def inputs_of(self, trunk: str, tokens: Tensor) -> GateInputs:
        """What the gates of a trunk with tokens (B, N, D) read."""
        if trunk not in self.inputs:
            self.inputs[trunk] = GateInputs.of(
                self.policies, self.state.frames, tokens.shape[1], tokens.device
            )
        return self.inputs[trunk]

    @property
    def flush_all(self) -> bool:
        """Whether every stream flushes."""
        return all(self.flushing)

    @property
    def flush_any(self) -> bool:
        """Whether some stream flushes."""
        return any(self.flushing)

    def flush_rows(self, device: torch.device) -> Tensor:
        """`flushing` as a tensor (B,)."""
        return torch.tensor(self.flushing, device=device)

    def flush(self, rows: list[bool]) -> None:
        """Make more streams flush in this step."""
        self.flushing[:] = [a or b for a, b in zip(self.flushing, rows, strict=True)]

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value computed once per step."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def constant(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value computed once for these weights."""
        if key in self.constants:
            return self.constants[key]
        made = make()
        # Work that is being recorded has no value before its first replay.
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self.constants[key] = made
        return made

    def record_gate(self, name: str, selection: Selection, error: Tensor | None) -> None:
        """Note what a gate let through."""
        keep = self.keep_maps
        self.record.gates[name] = GateRecord(
            selection.counts,
            error if keep else None,
            selection.mask() if keep else None,
            selection.wanted,
        )

    def record_block(self, name: str, shape: BlockShape, **work: Tensor) -> None:
        """Note what a block computed."""
        self.record.blocks[name] = BlockRecord(shape, work)


@dataclass(frozen=True, eq=False)
class Gate:
    """One gate in one step.

    Attributes:
        name: full name, e.g. `blocks.3.qkv`.
        leading: the first gate of its trunk.
        inputs: what it reads besides the tokens.
    """

    step: Step
    spec: BlockSpec
    kind: str
    name: str
    leading: bool
    inputs: GateInputs

    @classmethod
    def of(cls, step: Step, spec: BlockSpec, kind: str, tokens: Tensor) -> Gate:
        """A gate that tokens (B, N, D) are about to pass."""
        leading = spec.first and kind in LEADING
        inputs = step.inputs_of(spec.trunk, tokens)
        return cls(step, spec, kind, spec.gate_name(kind), leading, inputs)

    @property
    def reference(self) -> str:
        """Name of the reference in the state."""
        return f"{self.name}/reference"

    @property
    def previous(self) -> str:
        """Name of the last frame's sample in the state."""
        return f"{self.name}/previous"

    @property
    def wants_contrast(self) -> bool:
        """Whether anything is measured in multiples of the contrast of the tokens."""
        cuts = self.leading and self.step.config.scene_cut is not None
        inputs = self.inputs
        units = inputs.relative is not None or inputs.shared is not None or inputs.own_policies
        return self.kind == "frame" or cuts or units

    @property
    def samples(self) -> bool:
        """Whether a sample of the tokens is compared with the last frame's, or was before."""
        return (
            self.inputs.noise is not None
            or self.previous in self.step.state
            or any(getattr(policy, "needs_change", False) for policy in self.step.policies)
        )
