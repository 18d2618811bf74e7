"""One step as a pure function: frame, numbers and state in; output, report and state out.

The step runs the library's own rules, adapters and blocks on a state whose writes make new tensors
(`ValueState`), with a fixed number of slots, as on a device. torch.export traces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.engine.frames import cannot_take
from eventful.engine.launch import NotReached, launch
from eventful.errors import UnsupportedError
from eventful.export.outputs import Skeleton, flatten, leaf_names
from eventful.export.subject import Subject
from eventful.memory.state import blank, is_optional
from eventful.memory.values import ValueState
from eventful.policies import SelectionParams
from eventful.rules.step import GateInputs, Step

Forward = Callable[[nn.Module, Tensor], Any]


class Numbers(NamedTuple):
    """What a step reads besides the frame and the state.

    Attributes:
        turn: (1,) int64, frames since everything was recomputed, this one included.
        limits: (2,) int64, `cap` and `floor` of the policy, see `SelectionParams`.
        levels: (4,) float32, `level`, `low`, `renewal`, and 1 where the first two are multiples of
            the contrast of the tokens.
    """

    turn: Tensor
    limits: Tensor
    levels: Tensor

    @classmethod
    def of(cls, params: SelectionParams, turn: int) -> Numbers:
        """The numbers of a policy."""
        levels = [params.level, params.low, params.renewal, float(params.relative)]
        return cls(
            torch.tensor([turn]),
            torch.tensor([params.cap, params.floor]),
            torch.tensor(levels, dtype=torch.float32),
        )


class Entry(NamedTuple):
    """One tensor of the state, as a graph takes and returns it: (N, D), or (1,).

    Attributes:
        name: in the library's state, e.g. `blocks.3/key`.
        optional: NaN stands for a missing value; everything else is written by a flush.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    optional: bool


@dataclass(frozen=True, eq=False)
class Parts:
    """What a step gives.

    Attributes:
        leaves: tensors of the model's output, see `Skeleton`.
        report: (1, ops.REPORT) int32, see `ops.pick`; with column 4 set to whether the output is
            finite. Of a flush, columns 0 and 3 are N, 1 and 2 are 1, and 5 is -1: not known.
        index: (M,) selected tokens; the first `count` (1,) of them count. Empty for a flush.
        score: (N,) what tokens were ranked by. Empty for a flush.
        state: by name, (1, ...) each.
    """

    leaves: list[Tensor]
    skeleton: Skeleton
    report: Tensor
    index: Tensor
    count: Tensor
    score: Tensor
    state: dict[str, Tensor]


class PureStep:
    """Runs single steps of a subject as functions.

    Args:
        forward: calls the model on a frame.
    """

    def __init__(self, subject: Subject, forward: Forward | None = None) -> None:
        self.subject = subject
        self._forward: Forward = forward or (lambda model, frame: model(frame))
        self._constants: dict[Any, Any] = {}
        self.leaves: dict[str, torch.dtype] = {}  # of the model's outputs, by name
        self.entries, self.skeleton = self._discover()

    def _discover(self) -> tuple[list[Entry], Skeleton]:
        """Find out what the state holds, and compute what depends on the weights alone.

        A flush makes what a step needs; a step adds what may be missing.
        """
        example = self.subject.example
        blank_numbers = Numbers.of(self.subject.params, 1)
        with torch.no_grad(), ops.use_backend("portable"):
            try:
                first = self.run(example, blank_numbers, None, 0)
            except NotReached as error:
                raise cannot_take(self.subject.model, example, error.error) from error.error
            width = self.subject.widths([1])[0]
            second = self.run(example, blank_numbers, first.state, width)
        entries = [
            Entry(name, _without_batch(value), value.dtype, is_optional(name))
            for name, value in sorted(second.state.items())
        ]
        lost = [one.name for one in entries if not one.optional and one.name not in first.state]
        if lost:
            raise UnsupportedError(
                f"The state {', '.join(lost)} is not there after a flush, so it cannot be exported."
            )
        kinds = [one.dtype for one in first.leaves]
        self.leaves = dict(zip(leaf_names(first.skeleton), kinds, strict=True))
        return entries, first.skeleton

    def run(
        self, frame: Tensor, numbers: Numbers, state: dict[str, Tensor] | None, width: int
    ) -> Parts:
        """One step.

        Args:
            state: (1, ...) each; None for a flush.
            width: M, slots of the selection.
        """
        subject, flush = self.subject, state is None
        held = ValueState(state or {}, may_be_empty=not self._always_some)
        inputs = _inputs(numbers, width, frame.device)
        step = Step(
            subject.config, held, [subject.policy], [flush], {subject.trunk: subject.layout},
            keep_maps=not flush, constants=self._constants, inputs={subject.trunk: inputs},
        )  # fmt: skip
        for name in subject.session.heads:  # they run as they are, without maps of their own
            step.cache[("head", name)] = [True]
        output = launch(subject.session, step, lambda: self._forward(subject.model, frame))
        leaves, skeleton = flatten(output)
        report = inputs.report
        if flush:
            tokens = subject.layout.tokens
            report = report.new_tensor([[tokens, 1, 1, tokens, 1, -1]])
        report = torch.cat([report[:, :4], inputs.sound[:, None].int(), report[:, 5:]], dim=1)
        index, count, score = _choice(step, subject.trunk, frame.device)
        return Parts(leaves, skeleton, report, index, count, score, held.tensors)

    @property
    def _always_some(self) -> bool:
        """Whether every selection holds a token, whatever the policy, unless the frame is bad.

        Of a frame with NaN or Inf nothing is selected, and the padded slots stand for token 0. That
        must be a special token, whose value does not depend on the frame.
        """
        return bool(self.subject.config.protect and self.subject.layout.prefix)

    def after_flush(self, state: dict[str, Tensor]) -> list[Tensor]:
        """What a flush writes, in the order of `written`."""
        return [_squeezed(state[one.name]) for one in self.written]

    @property
    def written(self) -> list[Entry]:
        """The entries that a flush writes."""
        return [one for one in self.entries if not one.optional]

    def initial(self) -> dict[str, Tensor]:
        """The state of a stream that has seen no frame."""
        return {one.name: torch.full(one.shape, blank(one.name), dtype=one.dtype)
                for one in self.entries}  # fmt: skip


class DenseGraph(nn.Module):
    """The step that recomputes everything, to be traced: frame to output and new state."""

    def __init__(self, pure: PureStep) -> None:
        super().__init__()
        self._pure = [pure]  # not a submodule: its weights stay what they are in other graphs

    def forward(self, frame: Tensor) -> tuple[Tensor, ...]:
        """The leaves of the output, whether they are finite (1,), and the state."""
        pure = self._pure[0]
        parts = pure.run(frame, Numbers.of(pure.subject.params, 1), None, 0)
        return (*parts.leaves, parts.report, *pure.after_flush(parts.state))


class StepGraph(nn.Module):
    """The step with M slots, to be traced."""

    def __init__(self, pure: PureStep, width: int) -> None:
        super().__init__()
        self._pure, self._width = [pure], width

    def forward(
        self, frame: Tensor, turn: Tensor, limits: Tensor, levels: Tensor, *state: Tensor
    ) -> tuple[Tensor, ...]:
        """The leaves of the output, report, index, count, score, and the state."""
        pure = self._pure[0]
        held = {
            one.name: value if value.dim() == 1 else value[None]
            for one, value in zip(pure.entries, state, strict=True)
        }
        parts = pure.run(frame, Numbers(turn, limits, levels), held, self._width)
        cut = parts.report[:, 2] > 0
        after = []
        for one, before in zip(pure.entries, state, strict=True):
            value = _squeezed(parts.state[one.name])
            # A frame that starts over says nothing of how updates change the outputs.
            if one.name.endswith("/moved"):
                value = torch.where(cut, before, value)
            after.append(value)
        return (*parts.leaves, parts.report, parts.index, parts.count, parts.score, *after)


def _inputs(numbers: Numbers, width: int, device: torch.device) -> GateInputs:
    level, low, renewal, relative = (part[None] for part in numbers.levels.unbind())
    cap, floor = (part[None] for part in numbers.limits.unbind())
    return GateInputs(
        turn=numbers.turn,
        level=level,
        cap=cap,
        low=low,
        floor=floor,
        relative=relative,
        shared=None,
        renewal=renewal,
        noise=None,
        report=torch.zeros(1, ops.REPORT, dtype=torch.int32, device=device),
        sound=torch.ones(1, dtype=torch.bool, device=device),
        width=width,
    )


def _choice(step: Step, trunk: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Index, count and score of the frame gate; empty where everything was recomputed."""
    if step.flush_all:
        nothing = torch.zeros(0, device=device)
        return nothing.long(), nothing.long(), nothing
    chosen, gate = step.selections[trunk], next(iter(step.record.gates.values()))
    assert gate.error is not None
    return chosen.index[0], chosen.counts, gate.error[0]


def _without_batch(value: Tensor) -> tuple[int, ...]:
    return tuple(_squeezed(value).shape)


def _squeezed(value: Tensor) -> Tensor:
    """Without the axis of the streams, unless nothing else is left."""
    return value[0] if value.dim() > 1 else value


def state_values(entries: Sequence[Entry], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The tensors of a library's state in the order of the entries.

    Compiled code takes them with the strides it was compiled for, hence contiguous.
    """
    return [_squeezed(tensors[one.name]).contiguous() for one in entries]
