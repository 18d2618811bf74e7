"""convert and restore: give a model an eventful path, and remove it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

from torch import nn

from eventful.config import Config
from eventful.errors import ConfigError, Mismatch, NoMatchError, UnsupportedError
from eventful.rules.block import run_block
from eventful.rules.kernels import wide_windows
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.surgery.adapters import Adapter, adapters
from eventful.surgery.clones import clone_tree
from eventful.surgery.heads import install_heads
from eventful.surgery.inspection import Inspection, block_shapes, inspect
from eventful.surgery.linears import pack_linears
from eventful.surgery.matching import (
    BlockMatch,
    block_matches,
    join_names,
    known_trunks,
    mismatch_of,
    refuse_wrapped,
)
from eventful.surgery.original import Original
from eventful.surgery.part_hooks import PartHooks
from eventful.surgery.patches import PatchForward, embeds_patches
from eventful.surgery.session import Session, count_loads
from eventful.surgery.where import Named, Where, checked_where
from eventful.surgery.wrappers import checked_model, fixed_code, refuse_replaced
from eventful.tokens.layout import TokenLayout

__all__ = [
    "BlockForward",
    "BlockMatch",
    "Inspection",
    "block_shapes",
    "convert",
    "find_session",
    "global_attention",
    "inspect",
    "needs_host",
    "restore",
]

_MARK = "_eventful"  # attribute of the converted root that holds its Session


class BlockPlace(TypedDict):
    """Where a block is among the converted blocks of its trunk, see `BlockSpec`."""

    name: str
    trunk: str
    index: int
    depth: int
    first: bool
    last: bool
    context: tuple[str, ...]


class BlockForward:
    """A block's forward: eventful inside a step, the original outside."""

    def __init__(
        self,
        session: Session,
        trunk_name: str,
        block: nn.Module,
        following: nn.Module | None,
        place: BlockPlace,
    ) -> None:
        self.session, self.trunk_name, self.block, self.place = session, trunk_name, block, place
        self.following = following
        self._hooks = PartHooks(session, block, place["name"])
        self._known: tuple[tuple[int, int], BlockSpec] | None = None

    @property
    def spec(self) -> BlockSpec:
        """The block as it is now."""
        after = None if self.following is None else self._described(self.following).norm1
        return replace(self._described(self.block), next_norm=after, **self.place)

    def _described(self, block: nn.Module) -> BlockSpec:
        trunk, adapter = self.session.trunks[self.trunk_name]
        try:
            return adapter.spec(trunk, block)
        except Mismatch as reason:
            where = self.place["name"] if block is self.block else f"after {self.place['name']}"
            raise UnsupportedError(
                f"The {type(block).__name__} {where} was changed since the model was converted, "
                f"and cannot be made eventful any more: {reason}. Undo the change, or convert the "
                "model again."
            ) from reason

    def spec_in(self, step: Step) -> BlockSpec:
        """The block as it is in a step; kept until modules, parameters or settings change."""
        if step.structure is None:
            return self.spec
        key = (step.structure, self.session.revision)
        known = self._known  # another thread may step another stream
        if known is None or known[0] != key:
            known = self._known = (key, self.spec)
        return known[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the block takes, return what it returns."""
        step = self.session.step
        if step is None:
            return type(self.block).forward(self.block, *args, **kwargs)
        if self.place["first"]:
            step.unfinished.add(self.trunk_name)
        if self.place["last"]:
            step.unfinished.discard(self.trunk_name)
        if step.track is not None:
            spec = self.spec_in(step)
            return step.track.block(step, spec, (args, kwargs), partial(self._run, step))
        return self._run(step, args, kwargs)

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trunk, adapter = self.session.trunks[self.trunk_name]
        spec = self.spec_in(step)
        call = adapter.read_in(step, spec, args, kwargs)
        if spec.first and adapter.adds_positions:
            step.record.positions[self.trunk_name] = (call.tokens.shape[1], spec.dim)
        # A hook ahead of the next block gets what this one returns.
        hooked = self.following is not None and bool(self.following._forward_pre_hooks)
        if hooked or adapter.watched(spec, step) or not adapter.knows_loop(trunk):
            step.taps.setdefault(self.trunk_name, set()).add(spec.index)
        whole = step.flush_all or step.config.gating == "frame"  # not one operator alone
        with self._hooks.watched() if whole else nullcontext():
            result = run_block(spec, step, call.tokens, call.positions)
        return adapter.write_in(step, spec, result, args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}


def convert(
    model: nn.Module,
    config: Config | None = None,
    *,
    inplace: bool = False,
    where: Where | str | None = None,
) -> nn.Module:
    """Give a model an eventful path, used while a `Stream` steps it.

    Outside a stream the result computes what `model` computes, to the bit. Weights are shared and
    state-dict keys do not change. Other attributes are copied: to switch a LoRA off or to replace
    a module, change the result, or change `model` before converting it.

    Args:
        config: the update rule; `Config.fast()` if left out.
        inplace: change `model` itself (undone by `restore`) instead of returning a new tree.
        where: convert only the blocks for which `where(name, block)` is true, or those of a part
            of the model by its name, e.g. "vision_tower"; "vision" is the vision tower.

    Raises:
        NoMatchError: no block can be converted, or `where` fits none.
        ConfigError: `model` is not a module, is compiled or wrapped, or is converted already.
    """
    model = checked_model(model, "convert")
    config = Config.fast() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"convert takes a Config, got {config!r}; e.g. Config.fast(TopR(256)).")
    if find_session(model) is not None:
        raise ConfigError(
            "This model is converted already; restore it first, or convert the original."
        )
    refuse_wrapped(model)
    where = checked_where(where, model)
    original = None if inplace else Original(model)
    if not inplace:
        refuse_replaced(model, [trunk for _, trunk, _ in known_trunks(model)])
        model = clone_tree(model)
        assert original is not None
        original.pair(model)
    plans = [plan for plan in _plans(model, config, where) if plan.chosen]
    if not plans:
        raise NoMatchError(_explain(model, where))
    session = Session(config, original=original)
    for plan in plans:
        _install(session, plan)
    install_heads(session, model)
    session.place(model, _MARK, session)
    return model


@dataclass(frozen=True)
class _Plan:
    """What to convert in one trunk: blocks with their full names, and which of them."""

    name: str
    trunk: nn.Module
    adapter: Adapter
    blocks: list[tuple[str, nn.Module]]
    chosen: list[int]


def _plans(model: nn.Module, config: Config, where: Where | None) -> Iterator[_Plan]:
    for name, trunk, adapter in known_trunks(model):
        blocks = [(join_names(name, short), block) for short, block in adapter.blocks(trunk)]
        chosen = [
            i
            for i, (path, block) in enumerate(blocks)
            if (where is None or where(path, block)) and mismatch_of(adapter, trunk, block) is None
        ]
        if chosen and config.gating == "frame" and len(chosen) <= chosen[-1] - chosen[0]:
            gaps = [blocks[i][0] for i in range(chosen[0], chosen[-1]) if i not in chosen]
            raise UnsupportedError(
                "gating='frame' needs consecutive blocks, but between converted blocks "
                f"{', '.join(gaps)} is not converted. Use "
                "Config.exact(), Config.fast(gating='block'), or `where` to choose blocks in a row."
            )
        yield _Plan(name, trunk, adapter, blocks, chosen)


def _install(session: Session, plan: _Plan) -> None:
    session.trunks[plan.name] = (plan.trunk, plan.adapter)
    session.blocks[plan.name] = [plan.blocks[i][0] for i in plan.chosen]
    session.sequence[plan.name] = [block for _, block in plan.blocks]
    followed = _context_blocks(plan, session.config)
    for at, i in enumerate(plan.chosen):
        path, block = plan.blocks[i]
        following = None if at + 1 == len(plan.chosen) else plan.blocks[plan.chosen[at + 1]][1]
        place = BlockPlace(
            name=path,
            trunk=plan.name,
            index=i,
            depth=len(plan.chosen),
            first=i == plan.chosen[0],
            last=i == plan.chosen[-1],
            context=followed,
        )
        forward = BlockForward(session, plan.name, block, following, place)
        session.place(block, "forward", forward)
        pack_linears(session, block)
    for module in plan.trunk.modules():
        if embeds_patches(module):
            session.place(module, "forward", PatchForward(session, plan.name, module))
    for path, value in plan.adapter.prepare(plan.trunk, plan.name, session).items():
        owner, _, attribute = path.rpartition(".")
        session.place(plan.trunk.get_submodule(owner), attribute, value)
    session.handles.append(count_loads(plan.trunk, session))


def _context_blocks(plan: _Plan, config: Config) -> tuple[str, ...]:
    """The blocks whose attention selection by context follows: global ones, evenly spread."""
    if config.context is None:
        return ()
    specs = {i: plan.adapter.spec(plan.trunk, plan.blocks[i][1]) for i in plan.chosen}
    able = [i for i, spec in specs.items() if not spec.windowed and spec.bias is None]
    return tuple(plan.blocks[i][0] for i in config.context.spread(able))


def restore(model: nn.Module) -> nn.Module:
    """Undo an in-place `convert`; returns the model."""
    model = checked_model(model, "restore")
    session = find_session(model)
    if session is None:
        raise ConfigError("This model is not converted, so there is nothing to restore.")
    for module, attribute, before in reversed(session.placed):
        vars(module).pop(attribute, None)
        vars(module).update(before)
    for handle in session.handles:
        handle.remove()
    return model


def find_session(model: nn.Module) -> Session | None:
    """The session of a converted model, or of the one converted model inside it."""
    found = [vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)]
    if len(found) > 1:
        raise ConfigError(
            f"The model holds {len(found)} converted models; convert the whole model once instead."
        )
    return found[0] if found else None


def global_attention(session: Session) -> bool:
    """Whether the attention of every converted block is global, without relative position."""
    return all(spec.plain for spec in _specs(session))


def needs_host(session: Session, layouts: Mapping[str, TokenLayout]) -> str | None:
    """Why steps of a model must run on the host, whatever the rule is; None if they need not."""
    if len(session.trunks) > 1:
        return "the model has several trunks"
    return wide_windows((spec, layouts[spec.trunk]) for spec in _specs(session))


def _specs(session: Session) -> list[BlockSpec]:
    placed = (vars(module).get(attribute) for module, attribute, _ in session.placed)
    return [forward.spec for forward in placed if isinstance(forward, BlockForward)]


def _explain(model: nn.Module, where: Where | None) -> str:
    seen = block_matches(model)
    if isinstance(where, Named):
        seen, where = [block for block in seen if block.name in where.names], None
    if seen and where is not None and any(block.matched for block in seen):
        return (
            "`where` rejected every block; it is called with (name, block), e.g. ('blocks.0', ...)."
        )
    if seen:
        why = sorted({f"{block.type}: {block.reason}" for block in seen})
        return "No block can be made eventful. " + "; ".join(why) + "."
    fixed = fixed_code(model)
    if fixed is not None:
        return f"No known vision transformer inside {type(model).__name__}. {fixed}"
    if any(weight.is_meta for weight in model.parameters()):
        return (
            f"No vision transformer known by name inside {type(model).__name__}, and its weights "
            "are on the meta device: a structure is tried with weights, e.g. model.to_empty("
            "device='cpu')."
        )
    types = sorted({type(child).__name__ for child in model.modules()})
    known = ", ".join(adapter.name for adapter in adapters())
    return (
        f"No known vision transformer inside {type(model).__name__}. Known families: {known}. "
        f"Module types seen: {', '.join(types[:40])}. Add another family with "
        "eventful.register_adapter (docs/adapters.md)."
    )
