"""Heads that recompute only what a changed token can reach.

A convolution sees a neighbourhood. A head of convolutions on the tokens of a converted trunk keeps
its maps, compares the tokens with those the maps were made of, bit by bit, and computes the pixels
within reach of a token that differs. All other pixels keep their bits. See docs/heads.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.memory.state import StreamState
from eventful.ops import Changed, MapLayer, MapLevels
from eventful.rules.record import HeadWork
from eventful.rules.step import Step


class StepHead(Protocol):
    """A head that keeps its maps."""

    def step_forward(self, memory: HeadMemory, *args: Any) -> Any:
        """The head's forward in a step of a stream; None to run the original."""
        ...

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        ...


class HeadMemory:
    """What one head remembers, in one step of B streams.

    Attributes:
        step: the running step.
        name: of the head in the model; its tensors in the state are called `name/...`.
    """

    def __init__(self, step: Step, name: str) -> None:
        self.step, self.name = step, name

    @property
    def state(self) -> StreamState:
        """The memory of the streams."""
        return self.step.state

    def slot(self, name: str) -> str:
        """The full name of a tensor of this head."""
        return f"{self.name}/{name}"

    def constant(self, name: object, make: Callable[[], Any]) -> Any:
        """A value computed once for these weights and sizes."""
        return self.step.constant((self.name, name), make)

    def takes(self, batch: int, grid: tuple[int, int], like: Tensor) -> bool:
        """Whether features are those of a converted trunk's frames, in plain precision."""
        known = any(layout.grid == grid for layout in self.step.layouts.values())
        device = like.device.type
        return (
            known
            and batch == len(self.step.flushing)
            and like.is_floating_point()
            and not (device != "meta" and torch.is_autocast_enabled(device))
        )

    def on_host(self, like: Tensor) -> bool:
        """Whether a head without kernels may keep maps: on a CPU, where writes can be undone.

        A GPU would wait for the host to know which pixels changed, and a graph that is exported
        would hold the work of one frame.
        """
        return self.state.reversible and like.device.type == "cpu" and like.dtype == torch.float32

    def compare(self, tokens: Tensor, reference: str = "reference") -> Tensor:
        """Which tokens (B, N, D) differ in any bit from those the maps were made of; (B, N).

        The tokens take the place of those. In a stream that flushes all of them differ.

        Args:
            reference: name of the tokens in the memory of this head, which may take several.
        """
        name, state = self.slot(reference), self.state
        self.step.shared(("turn", self.name), lambda: self._count_turn(tokens.device))
        alike = name in state and state.raw(name).dtype == tokens.dtype
        if alike and not self.step.flush_all:
            changed = state.renew(name, tokens)
            if not self.step.flush_any:
                return changed
            changed = changed | self.step.flush_rows(tokens.device)[:, None]
        else:
            changed = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
            state.fill(name, tokens)
        return state.accepted(changed)

    def _count_turn(self, device: torch.device) -> None:
        """Count the steps this head took part in, for heads that follow it."""
        name, state = self.slot("turn"), self.state
        state.ensure(name, torch.zeros(len(state), dtype=torch.int64, device=device))
        state.fill(name, state[name] + 1, owned=True)

    def follow(self, head: str, changed: Tensor) -> Tensor:
        """The changes (B, ...) that this head, fed by another one, has to take in.

        All of it in streams in which it missed a change: the other head ran without it.
        """
        seen, state = self.slot("seen"), self.state
        turn = state[f"{head}/turn"]
        missed = torch.ones_like(turn, dtype=torch.bool)
        if seen in state:
            missed = state[seen] + 1 != turn
        state.fill(seen, turn)
        every = missed.view(-1, *[1] * (changed.dim() - 1))
        return state.accepted((changed | every).flatten(1)).view_as(changed)

    def open(self, name: str, changed: Tensor, channels: int, like: Tensor) -> Tensor:
        """A map (S, P, C) of this head whose places `changed` (B, P) are about to be written."""
        return self.state.open_where(self.slot(name), changed, channels, like)

    def maps(self, name: str) -> Tensor:
        """A map (B, P, C): the memory itself where it has one row per stream, else a copy."""
        tensor, slots = self.state.held(self.slot(name))
        if slots is None or len(tensor) == 1:  # a single row can only be the stream's
            return tensor
        return ops.take_slots(tensor, slots)

    def update(
        self, name: str, x: Tensor, layer: MapLayer, changed: Tensor | Changed, levels: MapLevels
    ) -> Tensor:
        """Bring a map of the state up to date with a layer on another one; returns it.

        Args:
            x: (S, P, C), a `raw` tensor of the state.
            changed: (B, P), a mask or listed once for several layers.
        """
        if isinstance(changed, Tensor):
            changed = ops.list_changed(changed, levels.sizes)
        out_ = self.open(name, changed.mask, layer.weight.shape[-1], x)
        ops.update_maps_(out_, x, layer, changed, levels, self.state.slots)
        self.note(name, layer.weight[0].numel(), levels.pixels, changed.count)
        return out_

    def note(self, layer: str, macs: int, places: int, count: Tensor) -> None:
        """Note that a layer computed `count` (B,) of its places, at `macs` operations each."""
        self.step.record.heads.setdefault(self.name, {})[layer] = HeadWork(macs, places, count)


def plain_parts(head: nn.Module, known: Iterable[type]) -> bool:
    """Whether a head is made of modules of these types alone, and nobody looks inside it.

    A hook, a replaced forward or a wrapped layer would not be called by the head's own step.
    """
    allowed = set(known)
    for module in head.modules():
        if module is head:
            continue
        forward = vars(module).get("forward")
        replaced = forward is not None and not getattr(forward, "same_result", False)
        if type(module) not in allowed or replaced:
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    return True


def conv_taps(conv: nn.Conv2d) -> Tensor:
    """The weight of a 3 x 3 or 1 x 1 convolution as (taps, C, C'), see `ops.MapLayer`."""
    return conv.weight.permute(2, 3, 1, 0).flatten(0, 1).contiguous()


def lift_weight(conv: nn.ConvTranspose2d, then: nn.Conv2d | None = None) -> tuple[Tensor, Tensor]:
    """A transposed convolution without overlap as a product, see `ops.lift_tokens_`.

    Args:
        then: a 1 x 1 convolution that follows at once; the two become one product.

    Returns:
        Weight (D, scale * scale * C') and bias (C').
    """
    weight = conv.weight.permute(0, 2, 3, 1)  # (D, scale, scale, C')
    bias = conv.bias if conv.bias is not None else weight.new_zeros(weight.shape[-1])
    if then is not None:
        matrix = then.weight[:, :, 0, 0].T.double()
        weight = (weight.double() @ matrix).to(conv.weight.dtype)
        bias = (bias.double() @ matrix).to(conv.weight.dtype)
        bias = bias if then.bias is None else bias + then.bias
    return weight.flatten(1).contiguous(), bias.contiguous()
