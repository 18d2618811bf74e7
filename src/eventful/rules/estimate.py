"""An estimate of how far the kept outputs are from those of the dense model.

Two things are known without running it: the scores of the tokens that are left as they are, and how
much the outputs of tokens change when they are updated. The estimate is a product of powers of the
two, fitted to the true error on several videos (docs/default.md).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.rules.spec import BlockSpec
from eventful.rules.step import Gate, Step
from eventful.tokens.selection import Selection

FACTOR, BY_SCORE, BY_CHANGE = 0.56, 0.4, 0.55
_KEPT = 0.5  # share of the old change kept at each frame
_LEAST = 1e-4


def estimate(this: Gate, score: Tensor, contrast: Tensor, updated: Tensor) -> Tensor:
    """(B,) estimated relative error of the outputs after this step.

    Args:
        score: (B, N) what tokens were ranked by.
        contrast: (B,) its unit.
        updated: (B, N) tokens that this step updates.
    """
    left = torch.where(updated, 0.0, score / contrast.clamp_min(1e-12)[:, None])
    waiting = left.square().mean(dim=-1).sqrt().clamp_min(_LEAST)
    name = _name(this.spec)
    this.step.state.ensure(name, waiting)
    change = this.step.state[name]
    change = torch.where(change.isnan(), waiting, change).clamp_min(_LEAST)
    return FACTOR * waiting**BY_SCORE * change**BY_CHANGE


def note_change(step: Step, spec: BlockSpec, slot: str, chosen: Selection, rows: Tensor) -> None:
    """Measure how much updates change the last outputs (B, N, D), before they are written.

    Args:
        rows: (B, M, D) the new ones of the selected tokens.
    """
    state, name = step.state, _name(spec)
    if step.flush_all or not chosen.width or name not in state:
        return
    memory, slots = state.held(slot)
    stream = torch.arange(len(rows), device=rows.device) if slots is None else slots
    old = memory[stream[:, None], chosen.index].float()
    size = rows.shape[-1:]
    apart = F.layer_norm(rows.float(), size) - F.layer_norm(old, size)
    square = apart.square().mean(dim=-1)  # (B, M)
    if chosen.valid is not None:
        square = torch.where(chosen.valid, square, 0.0)
    now = (square.sum(dim=-1) / chosen.counts.clamp_min(1)).sqrt()
    before = state[name]
    after = torch.where(before.isnan(), now, now + _KEPT * (before - now))
    state.fill(name, torch.where(chosen.counts > 0, after, before), owned=True)


def _name(spec: BlockSpec) -> str:
    return f"{spec.gate_name('frame')}/moved"
