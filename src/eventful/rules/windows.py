"""Windowed attention over buffered tokens: only the windows, and the queries, that matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.rules.relative import RelativePosition
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.tokens.packing import Packing
from eventful.tokens.selection import Selection


@dataclass(frozen=True, eq=False)
class WindowedAttention:
    """Attention inside windows, for one block of one step.

    Attributes:
        pad: q, k, v (1, 1, H*d) of a padding token; None where windows fit the grid, or end at its
            border.
    """

    spec: BlockSpec
    windows: ops.WindowGrid
    map: ops.WindowMap
    relative: RelativePosition | None
    pad: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, step: Step, spec: BlockSpec, like: Tensor, positions: Any) -> WindowedAttention:
        """Prepare for tokens like `like` (B, M, D)."""
        made: WindowedAttention = step.constant(
            (spec.name, "windows"), lambda: cls._make(step, spec, like, positions)
        )
        return made

    @classmethod
    def _make(cls, step: Step, spec: BlockSpec, like: Tensor, positions: Any) -> WindowedAttention:
        grid = step.layouts[spec.trunk].grid
        window = spec.window_on(grid)
        assert window is not None
        windows = ops.WindowGrid(grid, window)
        pad = None
        if windows.padded and spec.window_pads:
            # The models this serves pad after the layer norm, so a padding token is qkv(0).
            zero = like.new_zeros(1, 1, spec.dim)
            pad = spec.qkv(
                zero, torch.zeros(1, 1, dtype=torch.int64, device=like.device), positions
            )
        relative = None if spec.relative is None else RelativePosition.of(spec, window)
        return cls(spec, windows, ops.window_map(windows, like.device), relative, pad)

    def all_queries(self, q: Tensor, k: Tensor, v: Tensor, touched: Tensor, out: Tensor) -> Tensor:
        """Recompute every query of the windows in `touched` (B, W).

        Args:
            q, k, v: (B, N, H*d).
            out: (B, N, H*d) outputs so far; those of other windows are kept bit for bit.

        Returns:
            (B, N, H*d), a new tensor.
        """
        stream, window = touched.nonzero(as_tuple=True)
        out = out.clone()
        if len(window) == 0:
            return out
        parts = [self._windows(x, stream, window, i) for i, x in enumerate((q, k, v))]
        qh, kh, vh = (ops.split_heads(part, self.spec.heads) for part in parts)
        bias = None if self.relative is None else self.relative.bias_all(qh)
        index = self.map.members[window]
        real = index < self.map.window_of.numel()
        if self.pad is None and self.windows.padded:
            bias = ops.border_bias(real[:, None, None], bias, qh.dtype)
        result = ops.join_heads(ops.attend(qh, kh, vh, self.spec.scale, bias))
        out[stream[:, None].expand_as(index)[real], index[real]] = result[real].to(out.dtype)
        return out

    def selected_queries(
        self, step: Step, q: Tensor, selection: Selection, packing: Packing | None = None
    ) -> Tensor:
        """Attention of the selected queries (B, M, H*d) over their windows in the buffers.

        With a packing, queries and outputs are (1, P, H*d).
        """
        if packing is None:
            return self._selected(step, q, selection)
        if not packing.by_stream:
            return packing.pack(self._selected(step, packing.unpack(q), selection))
        parts = [
            self._selected(step, q[:, rows], Selection(index, selection.tokens), stream)
            for stream, rows, index in packing.streams()
        ]
        return torch.cat(parts, dim=1)

    def _selected(
        self, step: Step, q: Tensor, selection: Selection, stream: int | None = None
    ) -> Tensor:
        """The same for queries that are not packed, of all streams or of one."""
        state = step.state
        k, v = (state.raw(self.spec.slot(name)) for name in ("key", "value"))
        if stream is not None:
            k, v = k[stream : stream + 1], v[stream : stream + 1]
        qh, kh, vh = (ops.split_heads(part, self.spec.heads) for part in (q, k, v))
        parts = None
        if self.relative is not None:
            # Kept with its selection: an id may belong to another one later in the step.
            _, place = step.shared(
                ("place in window", self.windows, id(selection)),
                lambda: (selection, self.map.place_of[selection.index]),
            )
            parts = self.relative.logits(qh, place)
        pad = None if self.pad is None else (self.pad[1].flatten(), self.pad[2].flatten())
        out = ops.attend_windows(
            qh, kh, vh, self.spec.scale, self.windows, selection.index, parts, pad, state.slots,
            selection.places,
        )  # fmt: skip
        return ops.join_heads(out)

    def touched(self, selection: Selection) -> Tensor:
        """(B, W) windows that hold a selected token."""
        mask = torch.zeros(
            selection.batch,
            self.map.members.shape[0],
            dtype=torch.int64,
            device=selection.index.device,
        )
        selected = selection.mask().to(torch.int64)
        return mask.index_add_(1, self.map.window_of, selected) > 0

    def count(self, selection: Selection) -> Tensor:
        """(B,) windows that hold a selected token."""
        return self.touched(selection).sum(dim=1)

    def _windows(self, tokens: Tensor, stream: Tensor, window: Tensor, part: int) -> Tensor:
        """Tokens (T, S, H*d) of T windows, padding tokens filled in; `part` 0, 1, 2 = q, k, v."""
        index = self.map.members[window]
        count = tokens.shape[1]
        taken = tokens[stream[:, None], index.clamp_max(count - 1)]
        if self.pad is None:
            return taken
        return torch.where((index < count)[..., None], taken, self.pad[part].to(taken.dtype))


def update_windows(
    step: Step,
    spec: BlockSpec,
    selection: Selection,
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Any,
) -> tuple[Tensor, Tensor]:
    """A windowed block under operator gating: outputs of all tokens from the buffers.

    Returns:
        (B, N, H*d), and the number of windows computed per stream (B,).
    """
    state, config = step.state, step.config
    attention = WindowedAttention.of(step, spec, qkv[0], positions)
    if config.attention == "query" and config.windows == "touched":
        state.write_all({spec.slot("key"): qkv[1], spec.slot("value"): qkv[2]}, selection)
        rows = attention.selected_queries(step, qkv[0], selection)
        state.write(spec.slot("attended"), selection, rows)
        return state[spec.slot("attended")], attention.count(selection)
    for name, part in zip(("query", "key", "value"), qkv, strict=True):
        state.write(spec.slot(name), selection, part)
    q, k, v = (state[spec.slot(name)] for name in ("query", "key", "value"))
    if config.windows == "touched" and not step.flush_all:
        touched, before = attention.touched(selection), state[spec.slot("attended")]
    else:
        shape = (selection.batch, attention.windows.count)
        touched, before = q.new_ones(shape, dtype=torch.bool), torch.empty_like(q)
    out = attention.all_queries(q, k, v, touched, before)
    if config.windows == "touched":
        state.fill(spec.slot("attended"), out, owned=True)
    return out, touched.sum(dim=1)
