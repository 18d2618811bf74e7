"""Global attention kept up to date: the delta, exact, query and dense rules (Section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.rules.relative import DenseBias, RelativePosition
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.tokens.layout import TokenLayout
from eventful.tokens.packing import Packing
from eventful.tokens.selection import Selection

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Attended:
    """Attention outputs of all tokens.

    Attributes:
        tokens: (B, N, H*d), or a `raw` tensor of the state if `stored`.
        stored: dtype in which the stored outputs are used; None for outputs of their own.
        rebased: (B,) rows recomputed for their condition; None where there are none to count.
        waiting: (B,) rows that are to be, in the next steps.
    """

    tokens: Tensor
    stored: torch.dtype | None = None
    rebased: Tensor | None = None
    waiting: Tensor | None = None


@dataclass(frozen=True, eq=False)
class GlobalAttention:
    """One global attention in one step.

    Attributes:
        selection: tokens whose q, k, v were recomputed.
        keys: the same in the pooled key grid; `selection` itself without pooling.
        relative: relative position toward the (pooled) keys, None without.
        packing: of the queries; None where they are padded as `selection` is.
    """

    step: Step
    spec: BlockSpec
    layout: TokenLayout
    selection: Selection
    keys: Selection
    relative: RelativePosition | DenseBias | None
    packing: Packing | None = None

    @classmethod
    def of(
        cls, step: Step, spec: BlockSpec, selection: Selection, packing: Packing | None = None
    ) -> GlobalAttention:
        """Prepare one block's attention for the tokens that changed."""
        layout, pool = step.layouts[spec.trunk], step.config.pool
        keys = selection
        if pool > 1:
            keys = Selection.from_mask(layout.pool_mask(selection.mask(), pool))
        relative = None
        if spec.relative is not None:
            relative = step.constant(
                (spec.name, "relative"), lambda: RelativePosition.of(spec, layout.grid, pool)
            )
        elif spec.bias is not None:
            relative = step.constant((spec.name, "bias"), lambda: DenseBias.of(spec, layout, pool))
        return cls(step, spec, layout, selection, keys, relative, packing)

    def selected_queries(self, q: Tensor, fresh: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Rows of the selected queries (B, M, H*d) over all buffered keys and values.

        With a packing, queries and rows are (1, P, H*d).

        Args:
            fresh: keys and values of all tokens, where they were just computed: without slots to
                look up, a stock kernel can serve them.
        """
        parts = [
            ops.join_heads(ops.attend(*args, **named)) for args, named in self._over_all(q, fresh)
        ]
        return self._packed(parts)

    def selected_queries_lse(
        self, q: Tensor, fresh: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of the logits, (B, M, H)."""
        outs, found = [], []
        for args, named in self._over_all(q, fresh):
            out, lse = ops.attend_lse(*args, **named)
            outs.append(ops.join_heads(out))
            found.append(lse.transpose(1, 2).contiguous())
        return self._packed(outs), self._packed(found)

    def _packed(self, parts: list[Tensor]) -> Tensor:
        """What `_over_all` gave, packed as the queries are."""
        if self.packing is None:
            return parts[0]
        return torch.cat(parts, dim=1) if self.packing.by_stream else self.packing.pack(parts[0])

    @property
    def target(self) -> Selection:
        """What rows are written with, once they are `placed`."""
        return self.selection if self.packing is None else self.packing.target

    def placed(self, rows: Tensor) -> Tensor:
        """Rows as `target` takes them, of rows that are packed as the queries are."""
        return rows if self.packing is None else self.packing.placed(rows)

    def _over_all(
        self, q: Tensor, fresh: tuple[Tensor, Tensor] | None
    ) -> list[tuple[tuple[Tensor, Tensor, Tensor, float], dict[str, Any]]]:
        """The arguments of attention over all buffered keys and values.

        One call serves all streams; where the host knows the rows of a packing, one each.
        """
        slots = None
        if fresh is not None:
            k, v = fresh
        elif self.step.config.pool == 1:
            k, slots = self.step.state.held(self.spec.slot("key"))
            v, _ = self.step.state.held(self.spec.slot("value"))
        else:
            k, v = self.pooled("key"), self.pooled("value")
        packing, scale = self.packing, self.spec.scale
        if packing is None or not packing.by_stream:
            heads = self.heads(self.placed(q))
            named: dict[str, Any] = {"slots": slots, **self._bias(heads, self.selection.index)}
            if packing is not None:
                named["ragged"] = packing.ragged()
            return [((heads, self.heads(k), self.heads(v), scale), named)]
        calls = []
        for stream, rows, index in packing.streams():
            heads, own = self.heads(q[:, rows]), slice(stream, stream + 1)
            args = (heads, self.heads(k[own]), self.heads(v[own]), scale)
            calls.append((args, self._bias(heads, index)))
        return calls

    def _bias(self, heads: Tensor, index: Tensor) -> dict[str, Any]:
        """The relative position of queries at `index`, as `ops.attend` takes it."""
        if isinstance(self.relative, DenseBias):
            return {"bias": self.relative.bias(heads, index)}
        return {} if self.relative is None else {"relative": self.relative.logits(heads, index)}

    def buffer(self, qkv: QKV, *names: str) -> None:
        """Write the new rows of the named buffers."""
        for name, rows in zip(("query", "key", "value"), qkv, strict=True):
            if name in names:
                self.step.state.write(self.spec.slot(name), self.selection, rows)

    def get(self, name: str) -> Tensor:
        """One of the block's tensors."""
        return self.step.state[self.spec.slot(name)]

    def pooled(self, name: str) -> Tensor:
        """A buffered (B, N, H*d), pooled: (B, N_k, H*d)."""
        return self.layout.pool(self.get(name), self.step.config.pool)

    def heads(self, tokens: Tensor) -> Tensor:
        """(B, N, H*d) to (B, H, N, d)."""
        return ops.split_heads(tokens, self.spec.heads)

    def exact_memory(self) -> ops.ExactMemory:
        """What the exact rule keeps; keys and values pooled where they are."""
        state, pool = self.step.state, self.step.config.pool
        parts = {name: state.raw(self.spec.slot(name)) for name in _EXACT}
        if pool > 1:
            parts |= {name: self.layout.pool(parts[name], pool) for name in ("key", "value")}
        return ops.ExactMemory(*parts.values())

    def exchange_bias(self) -> dict[str, Tensor]:
        """The relative position of unchanged queries toward changed keys, if there is one."""
        if self.relative is None:
            return {}
        # Rows of a stream without changed keys stay as they are, as `ops.exchange_` leaves them.
        stays = self.selection.mask() | (self.selection.counts == 0)[:, None]
        others = Selection.from_mask(~stays)
        q = self.heads(others.gather(self.get("query")))
        return {"bias": self.relative.bias_at(q, others.index, self.keys.index)}

    def context_bias(self) -> dict[str, Any]:
        """The relative position of all queries and the places of changed keys, if there is one."""
        if self.relative is None:
            return {}
        assert isinstance(self.relative, RelativePosition)  # others are not followed
        state = self.step.state
        query = state.raw(self.spec.slot("query"))
        parts = ops.relative_logits_all(
            query, self.spec.heads, self.relative.rows, self.relative.columns, state.slots
        )
        return {"relative": parts, "index": self.keys.index}

    def bias_all(self, q: Tensor) -> Tensor | None:
        """Relative position of all queries (B, H, N, d)."""
        return None if self.relative is None else self.relative.bias_all(q)


def dense(attention: GlobalAttention, qkv: QKV) -> Attended:
    """All queries over all keys, from the buffers: the paper's token-wise ablation."""
    attention.buffer(qkv, "query", "key", "value")
    q, k, v = (attention.heads(attention.pooled(n) if n != "query" else attention.get(n))
               for n in ("query", "key", "value"))  # fmt: skip
    out = ops.attend(q, k, v, attention.spec.scale, attention.bias_all(q))
    return Attended(ops.join_heads(out))


def query(attention: GlobalAttention, qkv: QKV) -> Attended:
    """Rows of the selected queries only; the others keep their outputs."""
    state, spec = attention.step.state, attention.spec
    state.write_all({spec.slot("key"): qkv[1], spec.slot("value"): qkv[2]}, attention.selection)
    rows = attention.selected_queries(qkv[0])
    state.write(spec.slot("attended"), attention.selection, rows)
    return Attended(state.raw(spec.slot("attended")), stored=qkv[0].dtype)


def delta(attention: GlobalAttention, qkv: QKV) -> Attended:
    """The paper's sparse updates of q·k and A·v, or of one of the two."""
    rule = attention.step.config.attention
    attention.buffer(qkv, "query", "key", "value")
    q = attention.heads(attention.get("query"))
    k = attention.heads(attention.pooled("key"))
    product = (
        _query_key(attention, q, k)
        if rule != "delta-av"
        else ops.logits(q, k, attention.spec.scale)
    )
    bias = attention.bias_all(q)
    weights = (product if bias is None else product + bias).softmax(dim=-1)
    values = attention.pooled("value")
    if rule == "delta-qk":
        return Attended(ops.join_heads(weights @ attention.heads(values)))
    return Attended(_attention_value(attention, weights, values).to(qkv[0].dtype))


def _query_key(attention: GlobalAttention, q: Tensor, k: Tensor) -> Tensor:
    """B = q·kᵀ with changed rows and columns recomputed (Section 4.2, query-key product)."""
    step, slot, scale = attention.step, attention.spec.slot("product"), attention.spec.scale
    rows, columns = attention.selection, attention.keys
    if step.flush_all:
        step.state.fill(slot, ops.logits(q, k, scale), owned=True)
        return step.state[slot]
    step.state.write(slot, rows, ops.logits(rows.gather(q, 2), k, scale), dim=2)
    changed_keys = columns.gather(k, 2)
    if step.config.overlap == "twice":
        step.state.write(slot, columns, ops.logits(q, changed_keys, scale), dim=3)
        return step.state[slot]
    # Rows of changed queries are right already; only the others need their changed columns.
    others = rows.complement()
    block = columns.gather(step.state[slot], 3)
    others.scatter_(block, ops.logits(others.gather(q, 2), changed_keys, scale), dim=2)
    step.state.write(slot, columns, block, dim=3)
    return step.state[slot]


def _attention_value(attention: GlobalAttention, weights: Tensor, values: Tensor) -> Tensor:
    """A·v by deltas (Eq. 10), the A gate forced to the v gate's indices."""
    with torch.autocast(weights.device.type, enabled=False):  # sums keep the precision we chose
        return _accumulate(attention, weights, values)


def _accumulate(attention: GlobalAttention, weights: Tensor, values: Tensor) -> Tensor:
    step, spec, chosen = attention.step, attention.spec, attention.keys
    kind = torch.float32
    if step.config.accumulate == "half":
        kind = torch.float16 if weights.is_cuda else torch.bfloat16
        weights, values = weights.to(kind), values.to(kind)
    slot_a, slot_v, slot_sum = (spec.slot(name) for name in ("weights", "gated", "sum"))

    def full(rows: slice | Tensor) -> Tensor:
        return ops.join_heads(weights[rows].to(kind) @ attention.heads(values)[rows].to(kind))

    if step.flush_all:
        step.state.fill(slot_a, weights)
        step.state.fill(slot_v, values)
        step.state.fill(slot_sum, full(slice(None)), owned=True)
        return step.state[slot_sum]
    a_new, v_new = chosen.gather(weights, 3).to(kind), chosen.gather(values).to(kind)
    a_delta = a_new - chosen.gather(step.state[slot_a], 3).to(kind)
    v_delta = v_new - chosen.gather(step.state[slot_v]).to(kind)
    if chosen.valid is not None:  # deltas add up, so a padded slot must add nothing
        a_delta = a_delta * chosen.valid[:, None, None]
        v_delta = v_delta * chosen.valid[..., None]
    step.state.write(slot_a, chosen, a_new, dim=3)
    step.state.write(slot_v, chosen, v_new)
    # One product is added after the other, as in the authors' code: at half precision the order
    # decides how the sum is rounded.
    heads = attention.heads(step.state[slot_sum]) + a_new @ attention.heads(v_delta)
    heads += a_delta @ attention.heads(v_new - v_delta)
    total = ops.join_heads(heads)
    if step.flush_any:
        rows = step.flush_rows(weights.device)
        total[rows] = full(rows)
    step.state.fill(slot_sum, total, owned=True)
    return total


REBASED = 64  # rows recomputed for their condition in one step; others wait for the next
_EXACT = ("query", "key", "value", "attended", "lse", "condition")


def exact(attention: GlobalAttention, qkv: QKV) -> Attended:
    """Attention equal to dense on the buffers, by exchanging the changed keys' share.

    State per query and head: output, log-sum-exp and condition, all fp32. Rows of changed
    queries are recomputed; every other row swaps the old share of the changed keys for the
    new one (`ops.merge_partial`); of the rows whose condition grew too large, the worst are
    recomputed.
    """
    step, spec, chosen = attention.step, attention.spec, attention.selection
    state = step.state
    if step.flush_all:
        _flush_exact(attention, qkv)
        return Attended(state.raw(spec.slot("attended")), stored=qkv[0].dtype)
    if chosen.width == 0:
        return Attended(
            state.raw(spec.slot("attended")), stored=qkv[0].dtype, rebased=chosen.counts
        )
    new, old = _swap_keys(attention, qkv)
    for name in ("attended", "lse", "condition"):
        state.open(spec.slot(name))
    memory = attention.exact_memory()
    keys = ops.Picked(chosen.index, attention.keys.counts, chosen.located())
    # Where more rows are lost than are recomputed, threads that race decide which ones wait.
    limit = chosen.tokens if step.config.deterministic else min(REBASED, chosen.tokens)
    lost, many = ops.exchange_(
        memory, new, old, keys, spec.scale, step.config.rebase, state.slots, limit,
        **attention.exchange_bias(),
    )  # fmt: skip
    rows = ((chosen.index, chosen.counts), (lost, many))
    if attention.relative is None:
        ops.recompute_(memory, rows, spec.scale, state.slots)
    else:
        for index, count in rows:
            bias = attention.relative.bias(attention.heads(ops.gather(memory.query, index)), index)
            ops.recompute_(memory, ((index, count),), spec.scale, state.slots, bias=bias)
    rebased = many.clamp_max(limit)
    return Attended(memory.out, qkv[0].dtype, rebased, waiting=many - rebased)


def _flush_exact(attention: GlobalAttention, qkv: QKV) -> None:
    """Ordinary attention of all queries, and what the exact rule keeps of it."""
    state, spec, chosen = attention.step.state, attention.spec, attention.selection
    named = zip(("query", "key", "value"), qkv, strict=True)
    state.write_all({spec.slot(name): rows for name, rows in named}, chosen)
    # From the buffers, as later steps read them: other strides round otherwise.
    q = attention.heads(attention.get("query"))
    k, v = (attention.heads(attention.pooled(name)) for name in ("key", "value"))
    out, lse = ops.attend_partial(q, k, v, spec.scale, attention.bias_all(q))
    found = lse.transpose(1, 2)
    kept = {"attended": ops.join_heads(out), "lse": found, "condition": 1 + found.abs()}
    for name, rows in kept.items():
        state.write(spec.slot(name), chosen, rows.contiguous())


def _swap_keys(
    attention: GlobalAttention, qkv: QKV
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Write the new rows; the changed keys and values (B, J, H*d) as they are and as they were."""
    state, spec, chosen = attention.step.state, attention.spec, attention.selection
    state.write(spec.slot("query"), chosen, qkv[0])
    return swap_keys(attention, qkv[1:])


def swap_keys(
    attention: GlobalAttention, rows: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same for keys and values alone; they are packed where the target of a packing is."""
    state, spec, chosen = attention.step.state, attention.spec, attention.target
    names = (spec.slot("key"), spec.slot("value"))
    if attention.step.config.pool > 1:
        old = tuple(attention.keys.gather(attention.pooled(name)) for name in ("key", "value"))
        state.write_all(dict(zip(names, rows, strict=True)), chosen)
        new = tuple(attention.keys.gather(attention.pooled(name)) for name in ("key", "value"))
        return (new[0], new[1]), (old[0], old[1])
    buffers = (state.open(names[0], chosen), state.open(names[1], chosen))
    if attention.packing is not None and attention.packing.by_stream:
        before = (chosen.gather(buffers[0]), chosen.gather(buffers[1]))
        for buffer, values in zip(buffers, rows, strict=True):
            chosen.scatter_(buffer, values)
        return rows, before
    return rows, ops.swap_rows_(buffers, rows, chosen.index, chosen.count, state.slots)


RULES: dict[str, Callable[[GlobalAttention, QKV], Attended]] = {
    "dense": dense,
    "query": query,
    "delta": delta,
    "delta-qk": delta,
    "delta-av": delta,
    "exact": exact,
}
