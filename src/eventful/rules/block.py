"""An eventful transformer block under each gating: operator (the paper), block, frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.errors import NonFiniteError, UnsupportedError
from eventful.rules.attention import QKV, RULES, Attended, GlobalAttention
from eventful.rules.context import attend_in_context
from eventful.rules.estimate import note_change
from eventful.rules.gate import choose, gate
from eventful.rules.motion import carry, follow_motion, keep_picture
from eventful.rules.spec import BlockSpec, is_layer_norm
from eventful.rules.step import FlushRequired, Step
from eventful.rules.windows import WindowedAttention, update_windows
from eventful.tokens.packing import Packing
from eventful.tokens.selection import Selection


def run_block(spec: BlockSpec, step: Step, x: Tensor, positions: Any = None) -> Tensor:
    """Run one block of a step.

    Args:
        x: (B, N, D); with gating `frame`, between blocks, (B, M, D) of the selected tokens.
        positions: whatever the block's `qkv` needs to know about positions.

    Returns:
        (B, N, D), or (B, M, D) between blocks of gating `frame`.
    """
    if spec.name in step.record.blocks:
        raise UnsupportedError(
            f"Block {spec.name} was called twice in one step. A stream is one pass over one frame; "
            "give each pass its own Stream, or run them as one batch."
        )
    if spec.first:
        _check_layout(spec, step, x)
    result = _GATINGS[step.config.gating](spec, step, x, positions)
    if spec.last:
        _check_sound(step, step.inputs_of(spec.trunk, x).sound, result)
    return result


def _check_sound(step: Step, sound: Tensor, result: Tensor) -> None:
    """Note which streams' outputs (B, N, D) are finite; raise where the step can be undone."""
    total = result.flatten(1).sum(dim=1, dtype=torch.float32)  # one pass finds NaN and Inf
    sound.copy_(total.isfinite())
    if step.state.reversible and not sound.all():
        raise NonFiniteError(
            "NaN or Inf arose inside the model. The stream is as it was before this frame; check "
            "the frame's range, or run the model in a wider dtype (bf16 or fp32 instead of fp16).",
            rows=tuple((~sound).nonzero().flatten().tolist()),
        )


def _operator(spec: BlockSpec, step: Step, x: Tensor, positions: Any) -> Tensor:
    """Gate-buffer pairs around QKV, projection and MLP (Section 4.2, Figure 4)."""
    state = step.state
    _, chosen, normed = gate(step, spec, "qkv", x, norm=spec.norm1)
    qkv = spec.qkv(normed, chosen.index, positions)
    attended, work = _attend(spec, step, chosen, qkv, positions)

    _, through, rows = gate(step, spec, "projection", attended.tokens, stored=attended.stored)
    state.write(spec.slot("projection"), through, spec.projected(rows))

    update = spec.slot("projection")
    if spec.parallel:
        _, passed, normed = gate(step, spec, "mlp", x, norm=spec.norm2)
        y = state.added(x, update)
    else:
        y, passed, normed = gate(step, spec, "mlp", x, norm=spec.norm2, update=update)
    state.write(spec.slot("mlp"), passed, spec.transformed(normed))
    z = state.added(y, spec.slot("mlp"))

    work |= {"qkv": chosen.counts, "projection": through.counts, "mlp": passed.counts}
    _record(spec, step, work)
    return z


def _attend(
    spec: BlockSpec,
    step: Step,
    chosen: Selection,
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Any,
) -> tuple[Attended, dict[str, Tensor]]:
    """Attention outputs of all tokens under operator gating, and the numbers to count by."""
    if spec.windowed:
        tokens, windows = update_windows(step, spec, chosen, qkv, positions)
        return Attended(tokens), {"keys": chosen.counts, "windows": windows}
    attention = GlobalAttention.of(step, spec, chosen)
    attended = RULES[step.config.attention](attention, qkv)
    work = {"keys": attention.keys.counts}
    for name in ("rebased", "waiting"):
        number = getattr(attended, name)
        work |= {} if number is None else {name: number}
    return attended, work


def _whole(
    spec: BlockSpec,
    step: Step,
    tokens: Tensor,
    chosen: Selection,
    positions: Any,
    packing: Packing | None = None,
) -> Tensor:
    """Selected tokens (B, M, D), or packed (1, P, D), through a block against the K/V buffers."""
    ready = step.cache.pop(_NORMED, None)  # by the block before, of the tokens it passed on
    normed = ready[1] if ready is not None and ready[0] is tokens else spec.norm1(tokens)
    qkv = spec.qkv(normed, chosen.index if packing is None else packing.index, positions)
    attended, work = _attend_selected(spec, step, chosen, qkv, positions, packing)
    if spec.parallel:
        y, normed = tokens + spec.projected(attended), spec.norm2(tokens)
    else:
        y, normed = _add_norm(tokens, spec.project(attended), spec.project_scale, spec.norm2)
    count = chosen.counts
    _record(spec, step, {**work, "qkv": count, "projection": count, "mlp": count})
    if spec.next_norm is None or not is_layer_norm(spec.next_norm):
        return y + spec.transformed(normed)
    z, normed = _add_norm(y, spec.mlp(normed), spec.mlp_scale, spec.next_norm)
    step.cache[_NORMED] = (z, normed)
    return z


def _attend_selected(
    spec: BlockSpec,
    step: Step,
    chosen: Selection,
    qkv: QKV,
    positions: Any,
    packing: Packing | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Attention outputs of the selected tokens, packed as q is, and the numbers to count by."""
    q, k, v = qkv
    target = chosen
    if packing is not None:
        k, v, target = packing.placed(k), packing.placed(v), packing.target
    if not spec.followed:
        step.state.write_all({spec.slot("key"): k, spec.slot("value"): v}, target)
    if spec.windowed:
        windowed = WindowedAttention.of(step, spec, q.new_empty(1, 1, spec.dim), positions)
        attended = windowed.selected_queries(step, q, chosen, packing)
        _, touched = step.shared(
            ("touched", windowed.windows, id(chosen)), lambda: (chosen, windowed.count(chosen))
        )
        return attended, {"keys": chosen.counts, "windows": touched}
    attention = GlobalAttention.of(step, spec, chosen, packing)
    fresh = (k, v) if chosen.is_everything and step.config.pool == 1 else None
    work = {"keys": attention.keys.counts}
    if not spec.followed:
        return attention.selected_queries(q, fresh), work
    work["context"] = attention.keys.counts
    return attend_in_context(attention, (q, k, v), fresh), work


_NORMED, _LAST = "normed", "last block"


def _add_norm(
    tokens: Tensor, update: Tensor, scale: Tensor | None, norm: Any
) -> tuple[Tensor, Tensor]:
    """A residual sum and its norm, at once where the norm is an ordinary layer norm."""
    if is_layer_norm(norm):
        return ops.add_norm(tokens, update, scale, norm.weight, norm.bias, norm.eps)
    total = tokens + (update if scale is None else update * scale)
    return total, norm(total)


def _block(spec: BlockSpec, step: Step, x: Tensor, positions: Any) -> Tensor:
    """One gate per block; its output buffer feeds the next block."""
    chosen = choose(step, spec, "block", spec.norm1(x) if step.config.gate == "after-norm" else x)
    step.state.write(
        spec.slot("output"), chosen, _whole(spec, step, chosen.gather(x), chosen, positions)
    )
    return step.state.copy(spec.slot("output"))  # whoever sees it, the buffer will change


def _frame(spec: BlockSpec, step: Step, x: Tensor, positions: Any) -> Tensor:
    """One gate per frame; the selected tokens run through all blocks, then patch the output."""
    tokens = None
    if spec.first:
        chosen, tokens = _choose_in_frame(spec, step, x)
        step.selections[spec.trunk] = chosen
        _pack(spec, step, x, chosen, positions)
        step.record.frame_gates.append((x.shape[1], spec.dim))
    _check_order(spec, step)
    chosen, packing = step.selections[spec.trunk], step.packings.get(spec.trunk)
    if spec.trunk in step.compact:
        tokens = x
    elif packing is not None:
        tokens = packing.take(x) if tokens is None else packing.pack(tokens)
    elif tokens is None:
        tokens = chosen.gather(x)
    tokens = _whole(spec, step, tokens, chosen, positions, packing)
    slot, seen = spec.slot("output"), _seen(spec, step)
    if seen and slot not in step.state and not step.flush_all:
        raise FlushRequired
    if seen or slot in step.state:  # a layer tapped now and then keeps its buffer up to date
        carry(step, spec, slot)
        if spec.last:
            rows = tokens if packing is None else packing.unpack(tokens)
            note_change(step, spec, slot, chosen, rows)
        if packing is None:
            step.state.write(slot, chosen, tokens)
        else:
            step.state.write(slot, packing.target, packing.placed(tokens))
    if not seen:
        step.compact[spec.trunk] = chosen.index if packing is None else packing.index
        return tokens
    step.compact.pop(spec.trunk, None)
    return step.state.copy(slot)  # the caller may keep it; the buffer will change


def _check_order(spec: BlockSpec, step: Step) -> None:
    """Raise where a block is called that is not the next one."""
    before = step.cache.get((_LAST, spec.trunk))
    step.cache[_LAST, spec.trunk] = spec.index
    if not spec.first and before != spec.index - 1:
        what = "before the first one" if before is None else f"after block {before}"
        raise UnsupportedError(
            f"The model called its block {spec.name} {what} of its list. With gating='frame' "
            "every block is called, in the order in which they are listed. Use Config.exact(), or "
            "gating='block'."
        )


def _pack(spec: BlockSpec, step: Step, x: Tensor, chosen: Selection, positions: Any) -> None:
    """Pack the rows of the selected tokens, where the streams differ much in their number."""
    inputs = step.inputs_of(spec.trunk, x)
    if inputs.width is not None and inputs.rows is None:  # on a device the host decided before
        return
    if isinstance(positions, Tensor) and positions.dim() > 3 and len(positions) > 1:
        return  # each stream has positions of its own
    packing = Packing.of(chosen, inputs.rows)
    if packing is not None:
        step.packings[spec.trunk] = packing


def _choose_in_frame(spec: BlockSpec, step: Step, x: Tensor) -> tuple[Selection, Tensor | None]:
    """The tokens that pass the frame gate, and their values (B, M, D) where the gate took them."""
    after = step.config.gate == "after-norm"
    if spec.trunk in step.views:
        content = follow_motion(step, spec, x)
        chosen = choose(step, spec, "frame", spec.norm1(content) if after else content)
        keep_picture(step, spec)
        return chosen, None
    if after:
        return choose(step, spec, "frame", spec.norm1(x)), None
    _, chosen, tokens = gate(step, spec, "frame", x)
    return chosen, tokens


_GATINGS = {"operator": _operator, "block": _block, "frame": _frame}


def _seen(spec: BlockSpec, step: Step) -> bool:
    """Whether anyone but the next block looks at this block's output."""
    return spec.last or spec.index in step.taps.get(spec.trunk, ())


def _check_layout(spec: BlockSpec, step: Step, x: Tensor) -> None:
    layout = step.layouts[spec.trunk]
    if x.shape[0] != len(step.flushing):
        raise UnsupportedError(
            f"{len(step.flushing)} frames became a batch of {x.shape[0]} inside the model. A "
            "stream needs one sequence of tokens per frame. Frames have a batch dimension: "
            "(1, C, height, width), frame[None]."
        )
    if x.shape[1] != layout.tokens:
        raise UnsupportedError(
            f"The model made {x.shape[1]} tokens of a frame where its adapter expected {layout}. "
            "Pass frames of the size the model is set up for, or correct the adapter's `layout`."
        )


def _record(spec: BlockSpec, step: Step, work: dict[str, Tensor]) -> None:
    shape = step.constant(
        (spec.name, "shape"), lambda: spec.shape(step.layouts[spec.trunk], step.config)
    )
    step.record_block(spec.name, shape, **work)
