"""The estimated error of the kept outputs, see `ops.estimate_error_`, in the state of a stream."""

from __future__ import annotations

from torch import Tensor

from eventful import ops
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Gate, Step
from eventful.tokens.selection import Selection


def report_estimate(this: Gate, picked: ops.Picked, error: Tensor, contrast: Tensor) -> None:
    """Report the error to be expected; where it has lasted too long, the stream starts over.

    Args:
        error: (B, N) of the tokens.
        contrast: (B,) its unit.
    """
    state, inputs, name = this.step.state, this.inputs, _name(this.spec)
    state.ensure(name, contrast)
    ops.estimate_error_(
        error, contrast, picked, state.raw(name), inputs.turn, inputs.renewal, state.slots,
        inputs.report,
    )  # fmt: skip


def note_change(step: Step, spec: BlockSpec, slot: str, chosen: Selection, rows: Tensor) -> None:
    """Measure how much updates change the last outputs (B, N, D), before they are written.

    Args:
        rows: (B, M, D) the new ones of the selected tokens.
    """
    state, name = step.state, _name(spec)
    if step.flush_all or not chosen.width or name not in state:
        return
    # On a device a stream whose frame was bad has selected nothing, so nothing is written.
    ops.follow_change_(
        state.open(name), rows.detach(), state.raw(slot), chosen.index, chosen.count, state.slots
    )


def _name(spec: BlockSpec) -> str:
    return f"{spec.gate_name('frame')}/moved"
