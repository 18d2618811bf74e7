"""Token gates (Section 4.1): compare with the reference, select, remember.

The same operations run on every device. Where the state is reversible, the host reads the report
of the first gate at once: a bad frame raises, a scene cut flushes in the same step. Elsewhere
nothing waits: a bad frame's writes are masked, and the host reads the report later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.cost.fallback import Demand
from eventful.errors import NonFiniteError
from eventful.policies import SelectionParams, params_of
from eventful.rules.context import ContextChange
from eventful.rules.estimate import report_estimate
from eventful.rules.levels import Levels, Seen, caps_of, levels_of
from eventful.rules.own_policies import select_by_policies
from eventful.rules.refresh import refresh_turns
from eventful.rules.spec import BlockSpec, is_layer_norm
from eventful.rules.step import Gate, Step
from eventful.tokens.selection import Selection

UNCOUNTED = -1  # in a report: a flush has no memory to count the wanted tokens against


def gate(
    step: Step,
    spec: BlockSpec,
    kind: str,
    x: Tensor,
    *,
    norm: Any = None,
    update: str | None = None,
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Selection, Tensor]:
    """Pass tokens through a gate around an operator, and take those it lets through.

    Args:
        x: (B, N, D), or a tensor of the state if `stored`.
        norm: stands before the operator; the gate looks before or after it (`Config.gate`).
        update: name of a buffer to add to the tokens first.
        stored: `x` is a `raw` tensor of the state, to be seen in this dtype.

    Returns:
        The tokens with the update (B, N, D), the selection, and its normed tokens (B, M, D).
    """
    after = step.config.gate == "after-norm" and norm is not None
    numbers = ops.LayerNorm(norm.weight, norm.bias, norm.eps) if is_layer_norm(norm) else None
    if _in_parts(step) or (after and numbers is None):
        tokens = x if stored is None else ops.held(x, step.state.slots).to(stored)
        tokens = tokens if update is None else step.state.added(tokens, update)
        seen = norm(tokens) if after else tokens
        selection = choose(step, spec, kind, seen)
        rows = selection.gather(seen)
        return tokens, selection, rows if after or norm is None else norm(rows)
    this, seen_norm = Gate.of(step, spec, kind, x), numbers if after else None
    state, held = step.state, stored is not None
    reference = state.raw(this.reference)
    before = None if update is None else state.raw(update)
    tokens, error = ops.gate_error(x, reference, state.slots, seen_norm, before, held)
    seen = _measure(this, tokens, seen_norm, held)
    scores = _scores(this, {2.0: error}, seen)
    selection = _select(this, scores, seen, error)
    rows = ops.gate_rows(
        tokens, state.open(this.reference, selection), selection.index, selection.count,
        state.slots, seen_norm, held,
    )  # fmt: skip
    _remember(this, selection, seen.sampled)
    step.record_gate(this.name, selection, scores[2.0])
    return tokens, selection, rows if after or norm is None else norm(rows)


def _in_parts(step: Step) -> bool:
    """Whether the gates of a step compare, select and write apart, not in fused operations."""
    orders = {policy.order for policy in step.policies}
    apart = step.flush_all or not step.state.in_place
    return apart or step.config.reference != "update" or orders != {2.0}


def _measure(
    this: Gate,
    tokens: Tensor,
    norm: ops.LayerNorm | None = None,
    stored: bool = False,
    *,
    compares: bool = True,
) -> Seen:
    """What policies need to know of the tokens, as the gate sees them.

    Args:
        norm, stored: see `gate`.
        compares: the tokens are compared with a reference, so their contrast may be needed.
    """
    state, layout = this.step.state, this.step.layouts[this.spec.trunk]

    def drawn(part: Tensor) -> Tensor:
        few = ops.sample(part)
        if stored:
            few = ops.held(few.contiguous(), state.slots)
        if this.reference in state:
            few = few.to(state.raw(this.reference).dtype)
        return few if norm is None else norm.apply(few)

    patches = tokens[:, layout.prefix : layout.tokens - layout.suffix]
    contrast = None
    if compares and this.wants_contrast:
        contrast = ops.contrast(drawn(patches) if stored or norm is not None else patches)
    return Seen(drawn(tokens) if this.samples else None, contrast)


def choose(step: Step, spec: BlockSpec, kind: str, current: Tensor) -> Selection:
    """Pass tokens through a gate.

    Args:
        current: (B, N, D), the gate's input c.

    Returns:
        The tokens to recompute. The reference u is updated for them, or for all tokens
        with `reference="previous"`.
    """
    this, state = Gate.of(step, spec, kind, current), step.state
    compares = not step.flush_all or (this.leading and this.inputs.count_wanted)
    seen = _measure(this, current, compares=compares)
    scores: dict[float, Tensor] = {}
    if compares:
        errors = _errors(this, current)
        scores = _scores(this, errors, seen)
        selection = _select(this, scores, seen, errors.get(2.0))
    else:
        selection = _flush(this, current)
    if step.config.reference == "previous":
        state.fill(this.reference, current)
    else:
        state.write(this.reference, selection, selection.gather(current))
    _remember(this, selection, seen.sampled)
    step.record_gate(this.name, selection, scores.get(step.policies[0].order))
    return selection


def _errors(this: Gate, current: Tensor) -> dict[float, Tensor]:
    """Error norms (B, N) by order: those the policies need, and L2 for scene cuts."""
    step = this.step
    orders = {policy.order for policy in step.policies}
    if this.leading and step.config.scene_cut is not None:
        orders.add(2.0)
    reference, slots = step.state.raw(this.reference), step.state.slots
    return {order: ops.error_norm(current, reference, order, slots) for order in sorted(orders)}


def _scores(this: Gate, errors: dict[float, Tensor], seen: Seen) -> dict[float, Tensor]:
    """What tokens are ranked by: their errors (B, N) with what motion and context add to them."""
    step, spec, contrast = this.step, this.spec, seen.contrast
    if this.kind != "frame" or contrast is None:
        return errors
    context, motion = ContextChange.of(step, spec), step.motions.get(spec.trunk)
    prefix, slots = step.layouts[spec.trunk].prefix, step.state.slots
    return {
        order: ops.frame_score(
            error, contrast, context.changes, context.sizes, context.weight, motion, prefix, slots
        )
        for order, error in errors.items()
    }


def _flush(this: Gate, current: Tensor) -> Selection:
    """All tokens (B, N, D), without a memory to compare them with."""
    report = this.inputs.report
    if this.leading:
        report.fill_(UNCOUNTED)
        report[:, 1] = torch.isfinite(current).flatten(1).all(dim=1)
        report[:, 2] = 0
        _take_report(this)
    return _everything(this, current.shape[1], None)


def _everything(this: Gate, tokens: int, wanted: Tensor | None) -> Selection:
    """All tokens; where writes are masked, of the streams whose frame is finite.

    Args:
        wanted: (B,) tokens that wanted to pass; None where there was nothing to compare with.
    """
    report = this.inputs.report
    everything = Selection.everything(len(report), tokens, report.device)
    if this.step.state.reversible:
        return replace(everything, wanted=wanted)
    return replace(everything, count=(report[:, 1] > 0) * tokens, whole=True, wanted=wanted)


def _select(this: Gate, errors: dict[float, Tensor], seen: Seen, plain: Tensor | None) -> Selection:
    """Choose tokens; a scene cut, or dense being cheaper, makes streams flush.

    Args:
        errors: (B, N) what tokens are ranked by, in the norms that are needed.
        plain: (B, N) L2 errors without what is added to them, for scene cuts.
    """
    step, inputs = this.step, this.inputs
    error = _in_own_norm(step, errors)
    levels = levels_of(this, seen, error)
    rule = _rule(this, levels, error, plain)
    if inputs.shared is not None:
        forced = rule.forced(error.shape[1]) if rule.forces else None
        rule = replace(rule, cap=caps_of(this, seen, error, forced))
    width = 1 if inputs.count_wanted else inputs.width
    picked = ops.pick(error, rule, width, inputs.report)
    if inputs.rows is not None:
        picked = ops.fit_rows(picked, inputs.rows)
    if rule.scene is None and this.leading and step.config.scene_cut is not None:
        assert plain is not None
        _cut_by_l2(this, plain, levels.contrast)
    if this.leading and not inputs.count_wanted:
        if this.kind == "frame" and seen.contrast is not None and not inputs.own_policies:
            report_estimate(this, picked, error if plain is None else plain, seen.contrast)
        else:
            inputs.report[:, 5] = UNCOUNTED
    if this.leading:
        _take_report(this)
    levels.learn()
    wanted = inputs.report[:, 0].long() if this.leading else None  # a copy: the report is reused
    selection = Selection.of(picked, error.shape[1], wanted)
    if inputs.own_policies and not step.flush_all:
        selection = select_by_policies(step, this.spec, this.kind, errors, seen)
    if this.leading and _runs_dense(this, selection):
        step.flush([True] * selection.batch)
        step.record.fallback = True
        wanted = selection.counts if selection.wanted is None else selection.wanted
    if step.flush_all:
        return _everything(this, error.shape[1], wanted)
    if this.leading:
        step.record.estimates = inputs.report[:, 5].long()
    return selection.with_rows(step.flush_rows(error.device)) if step.flush_any else selection


def _in_own_norm(step: Step, errors: dict[float, Tensor]) -> Tensor:
    """(B, N) each stream's errors in the norm of its policy."""
    orders = [policy.order for policy in step.policies]
    if len(set(orders)) == 1:
        return errors[orders[0]]
    return torch.stack([errors[order][stream] for stream, order in enumerate(orders)])


def _rule(this: Gate, levels: Levels, error: Tensor, plain: Tensor | None) -> ops.PickRule:
    step, inputs = this.step, this.inputs
    layout, config = step.layouts[this.spec.trunk], step.config
    l2 = all(policy.order == 2.0 for policy in step.policies)
    scenes = this.leading and config.scene_cut is not None and l2
    turns = None if config.max_age is None else refresh_turns(step, this.spec, error.device)
    rule = ops.PickRule(
        level=levels.level,
        cap=inputs.cap,
        low=levels.low,
        floor=levels.floor,
        prefix=layout.prefix if config.protect else 0,
        suffix=layout.suffix if config.protect else 0,
        period=None if turns is None else turns.period,
        turn=inputs.turn,
        phase=None if turns is None else turns.phase,
        leading=this.leading,
        scene_error=plain if scenes and plain is not error else None,
        **(_scene(this, error, levels.contrast) if scenes else {}),
    )
    return replace(rule, counts=_counts(this, rule, error.shape[1]))


def _counts(this: Gate, rule: ops.PickRule, tokens: int) -> tuple[int, ...] | None:
    """How many tokens of each stream pass, where no policy has a level."""
    params = this.inputs.params
    if params is None or not all(one.fixed for one in params):
        return None
    counts, special = [], rule.prefix + rule.suffix
    turns = None if rule.period is None else refresh_turns(this.step, this.spec, rule.level.device)
    for one, frames in zip(params, this.step.state.frames, strict=True):
        forced = special
        if turns is not None:
            forced += turns.counts(special > 0)[(frames + 1) % turns.period]
        counts.append(min(tokens, forced + one.cap))
    return tuple(counts)


def _scene(this: Gate, error: Tensor, contrast: Tensor | None) -> dict[str, Any]:
    """The parts of a rule that follow the scene."""
    step, name = this.step, f"{this.name}/scene"
    cut = step.config.scene_cut
    assert cut is not None
    step.state.ensure(name, error[:, 0])
    return {
        "scene": step.state.open(name),
        "cut": (cut.factor, cut.fraction, cut.momentum),
        "cut_least": None if contrast is None else cut.least * contrast,
        "slots": step.state.slots,
        "hold": step.flush_rows(error.device) if step.flush_any and step.state.reversible else None,
    }


def _cut_by_l2(this: Gate, error: Tensor, contrast: Tensor | None) -> None:
    """Report scene cuts where the policies look at another norm."""
    nothing = torch.zeros_like(this.inputs.cap)
    level = error.new_full((len(error),), torch.inf)
    rule = ops.PickRule(level, nothing, **_scene(this, error, contrast))
    report = torch.zeros_like(this.inputs.report)
    ops.pick(error, rule, 1, report)
    this.inputs.report[:, 2] = report[:, 2]


def _take_report(this: Gate) -> None:
    """The first gate's report is complete."""
    step, report = this.step, this.inputs.report
    this.inputs.gated()
    if not step.state.reversible:
        step.state.accept(report[:, 1] > 0)
        return
    rows = report.tolist()
    if not all(row[1] for row in rows):
        raise NonFiniteError(
            "The embedded tokens contain NaN or Inf. The stream is as it was before this frame; "
            "check the decoder and the preprocessing, then go on with the next good frame."
        )
    step.flush([bool(row[2]) for row in rows])


def _runs_dense(this: Gate, selection: Selection) -> bool:
    """Whether dense is cheaper than what the first gate chose."""
    step, params = this.step, this.inputs.params
    if step.dense_if is None or step.flush_any:  # a cut in one stream says nothing of the others
        return False
    if params is None:  # some policy is the user's own: what it selects is its budget
        found = (params_of(policy, selection.tokens) for policy in step.policies)
        budget = [one is None or one.budget for one in found]
    else:
        budget = [one.budget for one in params]
    counts = selection.counts.tolist()
    wanted = counts if selection.wanted is None else selection.wanted.tolist()
    if params is not None:
        counts = _pooled_counts(params, counts)
    step.demand = Demand.of(wanted, counts, budget)
    return step.dense_if(step.demand)


def _pooled_counts(params: Sequence[SelectionParams], counts: list[int]) -> list[int]:
    """The tokens that decide: of streams that share a pool, their mean, which is their budget.

    The busiest of them may get most of the pool, but the others get the less.
    """
    pooled = [count for one, count in zip(params, counts, strict=True) if one.shared]
    mean = math.ceil(sum(pooled) / len(pooled)) if pooled else 0
    return [mean if one.shared else n for one, n in zip(params, counts, strict=True)]


def _remember(this: Gate, selection: Selection, sampled: Tensor | None) -> None:
    """Keep what the next frame is compared with, and the ages of the tokens."""
    step, state = this.step, this.step.state
    if sampled is not None:
        # A sample kept past the policy that wanted it would pass for the last frame later on.
        wanted = _wants_sample(this)
        kept = torch.full_like(sampled, torch.nan)
        if wanted is not None:
            kept = torch.where(wanted[:, None, None], sampled, kept)
        state.fill(this.previous, kept, owned=True)
    if step.config.max_age is not None and state.reversible:  # for policies of the user's own
        name, selected = f"{this.name}/age", selection.mask()
        before = state[name] if name in state else torch.zeros_like(selected, dtype=torch.int32)
        state.fill(name, (before + 1).masked_fill(selected, 0), owned=True)


def _wants_sample(this: Gate) -> Tensor | None:
    """(B,) streams whose policy compares with the last frame; None if none does."""
    if not this.inputs.own_policies:
        return None if this.inputs.noise is None else this.inputs.noise[3] > 0
    wants = [bool(getattr(policy, "needs_change", False)) for policy in this.step.policies]
    return torch.tensor(wants, device=this.inputs.cap.device)
