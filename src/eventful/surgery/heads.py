"""Heads that keep their maps: their forward inside a step, and what they hold.

A module offers this by two methods, see `rules.local.StepHead`. Modules of a model library cannot
be given methods. For them an adapter offers an object that has both (`surgery.adapters.hf_dense`).
See docs/heads.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from eventful.config import Config
from eventful.rules.local import HeadMemory, StepHead
from eventful.surgery.adapters import library_heads
from eventful.surgery.linears import pack_linears
from eventful.surgery.session import Session, count_loads


def local_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, StepHead]]:
    """The modules of a model that can keep their maps: name, module, and what runs its steps."""
    for name, module in model.named_modules():
        if callable(getattr(type(module), "step_forward", None)):
            yield name, module, cast(StepHead, module)
        for path, head in library_heads(module):
            yield f"{name}.{path}" if name else path, module.get_submodule(path), head


def keeps_maps(config: Config) -> bool:
    """Whether heads keep their maps: elsewhere nearly every token changes in every frame."""
    return config.gating in ("frame", "block")


def head_bytes(model: nn.Module, grid: tuple[int, int], config: Config, dtype: torch.dtype) -> int:
    """Bytes that the heads of a model hold for one stream with a grid (h, w) of tokens."""
    if not keeps_maps(config):
        return 0
    return sum(head.step_bytes(grid, dtype) for _, _, head in local_heads(model))


def install_heads(session: Session, model: nn.Module) -> None:
    """Give the heads of a converted model their forward in a step."""
    if not keeps_maps(session.config):
        return
    for name, module, head in local_heads(model):
        session.heads[name] = module
        session.place(module, "forward", HeadForward(session, name, module, head))
        pack_linears(session, module)
        session.handles.append(count_loads(module, session))


class HeadForward:
    """A head's forward: its own step inside a step, the original outside."""

    def __init__(self, session: Session, name: str, module: nn.Module, head: StepHead) -> None:
        self.session, self.name, self.module, self.head = session, name, module, head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the head takes, return what it returns."""
        step = self.session.step
        # A second call in one step has features that are not the stream's.
        if step is not None and not kwargs and step.shared(("head", self.name), list) == []:
            made = self.head.step_forward(HeadMemory(step, self.name), *args)
            if made is not None:
                step.cache[("head", self.name)].append(True)
                return made
        return type(self.module).forward(self.module, *args, **kwargs)
