"""Which modules of a model are trunks that an adapter knows, and which blocks it can describe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from eventful.surgery.adapters import Adapter, Mismatch, adapters
from eventful.surgery.adapters.structural import structural_trunks
from eventful.surgery.tokenwise import mixed_tokens
from eventful.surgery.wrappers import (
    is_compiled,
    refuse_compiled_part,
    refuse_moved_weights,
    refuse_wrappers,
)


@dataclass(frozen=True)
class BlockMatch:
    """One block of a model: whether it can be made eventful, and if not, why."""

    name: str
    type: str
    adapter: str
    reason: str | None = None

    @property
    def matched(self) -> bool:
        """Whether the block can be made eventful."""
        return self.reason is None


def refuse_wrapped(model: nn.Module) -> None:
    """Raise where a wrapper, such as a compiled module, hides a trunk or its blocks."""
    for name, trunk, adapter in known_trunks(model):
        parts = [trunk, *(block for _, block in adapter.blocks(trunk))]
        refuse_wrappers(model, parts, "eventful.Stream(eventful.convert(model))")
        refuse_moved_weights(model, parts)
        refuse_unreadable(name, trunk, adapter)


def refuse_unreadable(name: str, trunk: nn.Module, adapter: Adapter) -> None:
    """Raise where a compiled part keeps a block of a trunk from being read."""
    if not any(is_compiled(module) for module in trunk.modules()):
        return
    for short, block in adapter.blocks(trunk):
        try:
            adapter.spec(trunk, block)
        except Mismatch as reason:
            refuse_compiled_part(block, join_names(name, short), str(reason))


def known_trunks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The trunks inside a model, each with its name and its adapter; never one inside another.

    Without weights, on the meta device, a structure cannot be tried, and named ones are all.
    """
    found: list[str] = []
    for name, module, adapter in named_trunks(model):
        found.append(name)
        yield name, module, adapter
    if not any(weight.is_meta for weight in model.parameters()):
        yield from structural_trunks(model, found)


def named_trunks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The trunks that an adapter knows by name."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name == known or name.startswith(f"{known}.") or known == "" for known in found):
            continue
        adapter = next((a for a in adapters() if a.matches(module)), None)
        if adapter is not None:
            found.append(name)
            yield name, module, adapter


def mismatch_of(adapter: Adapter, trunk: nn.Module, block: nn.Module) -> str | None:
    """Why a block cannot be made eventful; None if it can."""
    try:
        adapter.spec(trunk, block)
    except Mismatch as reason:
        return str(reason)
    return mixed_tokens(block, partial(adapter.spec, trunk))


def block_matches(model: nn.Module) -> list[BlockMatch]:
    """Every block of every known trunk, matched or not."""
    return [
        BlockMatch(
            join_names(name, short),
            type(block).__name__,
            adapter.name,
            mismatch_of(adapter, trunk, block),
        )
        for name, trunk, adapter in known_trunks(model)
        for short, block in adapter.blocks(trunk)
    ]


def join_names(prefix: str, name: str) -> str:
    """The dotted name of a module inside another; the root's own name is empty."""
    return f"{prefix}.{name}" if prefix else name
