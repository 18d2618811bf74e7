"""Heads that keep their maps: their forward inside a step, and what they hold.

A module offers this by two methods. `step_forward(memory, *args)` runs it in a step with a
`rules.local.HeadMemory`; it returns None where it has to run as it is. `step_bytes(grid, dtype)`
says how many bytes it then holds for one stream. See docs/heads.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from eventful.config import Config
from eventful.rules.local import HeadMemory
from eventful.surgery.linears import pack_linears
from eventful.surgery.session import Session, count_loads


def local_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that can keep their maps, by name."""
    for name, module in model.named_modules():
        if callable(getattr(type(module), "step_forward", None)):
            yield name, module


def keeps_maps(config: Config) -> bool:
    """Whether heads keep their maps: elsewhere nearly every token changes in every frame."""
    return config.gating in ("frame", "block")


def head_bytes(model: nn.Module, grid: tuple[int, int], config: Config, dtype: torch.dtype) -> int:
    """Bytes that the heads of a model hold for one stream with a grid (h, w) of tokens."""
    if not keeps_maps(config):
        return 0
    sizes: list[Any] = [module for _, module in local_heads(model)]
    return sum(int(head.step_bytes(grid, dtype)) for head in sizes)


def install_heads(session: Session, model: nn.Module) -> None:
    """Give the heads of a converted model their forward in a step."""
    if not keeps_maps(session.config):
        return
    for name, module in local_heads(model):
        session.heads[name] = module
        session.place(module, "forward", HeadForward(session, name, module))
        pack_linears(session, module)
        session.handles.append(count_loads(module, session))


class HeadForward:
    """A head's forward: its own step inside a step, the original outside."""

    def __init__(self, session: Session, name: str, module: nn.Module) -> None:
        self.session, self.name, self.module = session, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the head takes, return what it returns."""
        step, module = self.session.step, self.module
        # A second call in one step has features that are not the stream's.
        if step is not None and not kwargs and step.shared(("head", self.name), list) == []:
            made = module.step_forward(HeadMemory(step, self.name), *args)  # type: ignore[operator]
            if made is not None:
                step.cache[("head", self.name)].append(True)
                return made
        return type(module).forward(module, *args, **kwargs)
