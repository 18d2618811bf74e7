"""Global attention kept up to date on the device: the exact and query rules of `attention`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eventful import ops
from eventful.memory.slots import SlotState
from eventful.rules.attention import QKV, GlobalAttention

REBASED = 64  # rows recomputed for their condition in one step; others wait for the next


def query(attention: GlobalAttention, qkv: QKV) -> tuple[Tensor, Tensor | None]:
    """See `attention.query`; returns the memory."""
    state, spec, chosen = attention.step.state, attention.spec, attention.selection
    state.write_all({spec.slot("key"): qkv[1], spec.slot("value"): qkv[2]}, chosen)
    state.write(spec.slot("attended"), chosen, attention.selected_queries(qkv[0]))
    return state.raw(spec.slot("attended")), None


def exact(attention: GlobalAttention, qkv: QKV) -> tuple[Tensor, Tensor | None]:
    """See `attention.exact`; returns the memory of the outputs, fp32."""
    step, spec, chosen = attention.step, attention.spec, attention.selection
    state = step.state
    assert isinstance(state, SlotState)
    assert state.slots is not None
    buffers = {spec.slot(n): x for n, x in zip(("query", "key", "value"), qkv, strict=True)}
    if step.flush_all:
        state.write_all(buffers, chosen)
        q, k, v = (attention.heads(part) for part in qkv)
        out, lse = ops.attend_partial(q, k, v, spec.scale)
        found = lse.transpose(1, 2)
        for name, rows in (
            ("attended", ops.join_heads(out)), ("lse", found), ("condition", 1 + found.abs())
        ):  # fmt: skip
            state.write(spec.slot(name), chosen, rows.contiguous())
        return state.raw(spec.slot("attended")), None
    names = ("query", "key", "value", "attended", "lse", "condition")
    memory = ops.ExactMemory(*(state.raw(spec.slot(name)) for name in names))
    assert chosen.count is not None
    assert chosen.places is not None
    picked = ops.Picked(chosen.index, chosen.count, chosen.places)
    new = (qkv[1], qkv[2])
    old = ops.swap_rows_((memory.key, memory.value), new, chosen.index, chosen.count, state.slots)
    state.write(spec.slot("query"), chosen, qkv[0])
    # Where more rows are lost than are recomputed, threads that race decide which ones wait.
    most = chosen.tokens if step.config.deterministic else min(REBASED, chosen.tokens)
    lost, many = ops.exchange_(
        memory, new, old, picked, spec.scale, step.config.rebase, state.slots, most
    )
    ops.recompute_(memory, ((chosen.index, chosen.count), (lost, many)), spec.scale, state.slots)
    return memory.out, many.clamp_max(most)


RESIDENT_RULES: dict[str, Callable[[GlobalAttention, QKV], tuple[Tensor, Tensor | None]]] = {
    "query": query,
    "exact": exact,
}
