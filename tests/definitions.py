"""The frame rule by its definition, on a library's own model.

Each block sees, in place of a token that was not selected, what it saw when the token was last
selected; what a block returns for such a token is forgotten. That is what keeping keys, values and
outputs amounts to.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eventful import Stream
from eventful.surgery.conversion import BlockForward


class DefinedModel:
    """A dense model that follows the selections of a stream of its converted twin."""

    def __init__(self, model: nn.Module, stream: Stream) -> None:
        self.model, self.stream = model, stream
        for name, block in model.named_modules():
            forward = vars(stream.model.get_submodule(name)).get("forward")
            if isinstance(forward, BlockForward):
                vars(block)["forward"] = _Block(self, forward, block)

    def selected(self, forward: BlockForward, like: Tensor) -> Tensor:
        """Which tokens the stream's last step selected, in the shape of a block's tokens."""
        step = self.stream.last
        assert step is not None
        trunk = forward.trunk_name
        gate = step.gates[f"{trunk}.frame" if trunk else "frame"]
        assert gate.mask is not None
        adapter = stream_adapter(self.stream, trunk)
        here: Any = SimpleNamespace(compact={}, layouts=step.layouts)
        mask = adapter.write_in(here, forward.spec, gate.mask[..., None].float(), (like,))
        return (mask[0] if isinstance(mask, tuple) else mask).bool()


def stream_adapter(stream: Stream, trunk: str) -> Any:
    """The adapter of a trunk."""
    return stream._session.trunks[trunk][1]


class _Block:
    """A block's forward that patches what goes in and what comes out.

    Attributes:
        held: tokens (of any shape) before and after the block, as they were when last selected.
    """

    def __init__(self, owner: DefinedModel, forward: BlockForward, block: nn.Module) -> None:
        self.owner, self.forward, self.block = owner, forward, block
        self.held: list[Tensor | None] = [None, None]

    def _patched(self, which: int, tokens: Tensor) -> Tensor:
        held = self.held[which]
        if held is not None:
            tokens = torch.where(self.owner.selected(self.forward, tokens), tokens, held)
        self.held[which] = tokens
        return tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._patched(0, args[0]), *args[1:])
        else:
            name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
            kwargs = {**kwargs, name: self._patched(0, kwargs[name])}
        result = type(self.block).forward(self.block, *args, **kwargs)
        if isinstance(result, tuple):
            return (self._patched(1, result[0]), *result[1:])
        return self._patched(1, result)
