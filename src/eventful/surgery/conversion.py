"""convert, restore, inspect: give a model an eventful path, take it away, or only look."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from eventful.config import PRESETS, Config
from eventful.cost.counting import BlockShape
from eventful.cost.footprint import state_bytes
from eventful.errors import ConfigError, NoMatchError, UnsupportedError
from eventful.rules.block import run_block
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.surgery.adapters import Adapter, Mismatch, adapters
from eventful.surgery.original import Original
from eventful.surgery.patches import PatchForward, embeds_patches
from eventful.surgery.session import Session, count_loads
from eventful.surgery.tokenwise import mixed_tokens
from eventful.surgery.wrappers import checked_model, fixed_code, refuse_replaced, refuse_wrappers
from eventful.tokens.layout import TokenLayout

_MARK = "_eventful"  # attribute of the converted root that holds its Session


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


@dataclass(frozen=True)
class Inspection:
    """What `convert` would do to a model.

    Attributes:
        size: frame size (height, width) the numbers are for; None if there is no known trunk.
        tokens: N per frame, by trunk.
        state_bytes: bytes per stream, by preset, without tapped layers.
    """

    blocks: list[BlockMatch]
    size: tuple[int, int] | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        """How many blocks can be made eventful."""
        return sum(block.matched for block in self.blocks)

    def __str__(self) -> str:
        if not self.blocks:
            return "No known vision transformer inside (docs/adapters.md)."
        families = ", ".join(sorted({block.adapter for block in self.blocks}))
        size = "x".join(map(str, self.size or ()))
        state = ", ".join(f"{name} {n / 1e6:,.1f} MB" for name, n in self.state_bytes.items())
        lines = [
            f"{self.matched} of {len(self.blocks)} blocks can be made eventful ({families}).",
            f"Tokens of a frame of {size} px: {sum(self.tokens.values())}.",
            f"State of one stream: {state}.",
        ]
        missed = [block for block in self.blocks if not block.matched]
        lines += [f"Not {block.name} ({block.type}): {block.reason}." for block in missed]
        return "\n".join(lines)

    __repr__ = __str__  # a notebook shows this


class BlockForward:
    """A block's forward: eventful inside a step, the original outside."""

    def __init__(
        self,
        session: Session,
        trunk_name: str,
        block: nn.Module,
        following: nn.Module | None,
        place: dict[str, Any],
    ) -> None:
        self.session, self.trunk_name, self.block, self.place = session, trunk_name, block, place
        self.following = following
        self._known: tuple[tuple[int, int], BlockSpec] | None = None

    @property
    def spec(self) -> BlockSpec:
        """The block as it is now."""
        trunk, adapter = self.session.trunks[self.trunk_name]
        after = None if self.following is None else adapter.spec(trunk, self.following).norm1
        return replace(adapter.spec(trunk, self.block), next_norm=after, **self.place)

    def spec_in(self, step: Step) -> BlockSpec:
        """The block as it is in a step: made anew for other modules, parameters or settings."""
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
        if step.track is not None:
            spec = self.spec_in(step)
            return step.track.block(step, spec, (args, kwargs), partial(self._run, step))
        return self._run(step, args, kwargs)

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trunk, adapter = self.session.trunks[self.trunk_name]
        spec = self.spec_in(step)
        call = adapter.read(spec, args, kwargs)
        if spec.first and adapter.adds_positions:
            step.record.positions[self.trunk_name] = (call.tokens.shape[1], spec.dim)
        if adapter.watched(spec, step) or not adapter.knows_loop(trunk):
            step.taps.setdefault(self.trunk_name, set()).add(spec.index)
        result = run_block(spec, step, call.tokens, call.positions)
        full = self.trunk_name not in step.compact
        return adapter.write(result, step.layouts[self.trunk_name] if full else None, args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}


def convert(
    model: nn.Module,
    config: Config | None = None,
    *,
    inplace: bool = False,
    where: Callable[[str, nn.Module], bool] | None = None,
) -> nn.Module:
    """Give a model an eventful path, used while a `Stream` steps it.

    Outside a stream the result computes what `model` computes, to the bit. Weights are
    shared, state-dict keys do not change. Other attributes are those of the moment: switch a
    LoRA off, or replace a module, in the result, or in `model` before converting it.

    Args:
        config: the update rule; `Config.fast()` if left out.
        inplace: change `model` itself (undone by `restore`) instead of returning a new tree.
        where: convert only the blocks for which `where(name, block)` is true.

    Raises:
        NoMatchError: no block can be converted.
        ConfigError: `model` is no model, is compiled or wrapped, or is converted already.
    """
    model = checked_model(model, "convert")
    config = Config.fast() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"convert takes a Config, got {config!r}; e.g. Config.fast(TopR(256)).")
    if find_session(model) is not None:
        raise ConfigError(
            "This model is converted already; restore it first, or convert the original."
        )
    if where is not None and not callable(where):
        raise ConfigError(
            "where is a function of (name, block) that is true for blocks to convert, got "
            f"{where!r}; e.g. where=lambda name, block: name != 'blocks.0'."
        )
    _refuse_wrappers(model)
    original = None if inplace else Original(model)
    if not inplace:
        refuse_replaced(model, [trunk for _, trunk, _ in _trunks(model)])
        model = _clone(model)
    plans = [plan for plan in _plans(model, config, where) if plan.chosen]
    if not plans:
        raise NoMatchError(_explain(model, where))
    session = Session(config, original=original)
    for plan in plans:
        _install(session, plan)
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


def _plans(
    model: nn.Module, config: Config, where: Callable[[str, nn.Module], bool] | None
) -> Iterator[_Plan]:
    for name, trunk, adapter in _trunks(model):
        blocks = [(_join(name, short), block) for short, block in adapter.blocks(trunk)]
        chosen = [
            i
            for i, (path, block) in enumerate(blocks)
            if (where is None or where(path, block)) and _reason(adapter, trunk, block) is None
        ]
        if chosen and config.gating == "frame" and len(chosen) <= chosen[-1] - chosen[0]:
            gaps = [blocks[i][0] for i in range(chosen[0], chosen[-1]) if i not in chosen]
            raise UnsupportedError(
                "gating='frame' carries the selected tokens through consecutive blocks, but in "
                f"between {', '.join(gaps)} is not converted. Use gating='operator' or 'block'."
            )
        yield _Plan(name, trunk, adapter, blocks, chosen)


def _install(session: Session, plan: _Plan) -> None:
    session.trunks[plan.name] = (plan.trunk, plan.adapter)
    session.blocks[plan.name] = [plan.blocks[i][0] for i in plan.chosen]
    session.sequence[plan.name] = [block for _, block in plan.blocks]
    for at, i in enumerate(plan.chosen):
        path, block = plan.blocks[i]
        following = None if at + 1 == len(plan.chosen) else plan.blocks[plan.chosen[at + 1]][1]
        place = {
            "name": path,
            "trunk": plan.name,
            "index": i,
            "depth": len(plan.chosen),
            "first": i == plan.chosen[0],
            "last": i == plan.chosen[-1],
        }
        forward = BlockForward(session, plan.name, block, following, place)
        session.place(block, "forward", forward)
    for module in plan.trunk.modules():
        if embeds_patches(module):
            session.place(module, "forward", PatchForward(session, module))
    for path, value in plan.adapter.prepare(plan.trunk, plan.name, session).items():
        owner, _, attribute = path.rpartition(".")
        session.place(plan.trunk.get_submodule(owner), attribute, value)
    session.handles.append(count_loads(plan.trunk, session))


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


def inspect(model: nn.Module, size: tuple[int, int] | int | None = None) -> Inspection:
    """A dry run of `convert`: which blocks match, which not and why, and what state costs.

    Args:
        size: frame size in pixels; the model's own if left out.
    """
    _refuse_wrappers(checked_model(model, "inspect"))
    tokens: dict[str, int] = {}
    total = dict.fromkeys(PRESETS, 0)
    pixels = None if size is None else _checked_size(size)
    for name, trunk, adapter in _trunks(model):
        pixels = pixels or adapter.default_size(trunk)
        layout = adapter.layout(trunk, pixels)
        tokens[name] = layout.tokens
        for preset in PRESETS:
            total[preset] += _trunk_bytes(trunk, adapter, layout, Config.preset(preset))
    return Inspection(_block_matches(model), pixels, tokens, total)


def _checked_size(size: Any) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else size
    sides = tuple(pair) if isinstance(pair, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(f"size is one side or (height, width) in pixels, got {size!r}.")
    return sides[0], sides[1]


def block_shapes(
    model: nn.Module, size: tuple[int, int] | int, config: Config
) -> tuple[BlockShape, ...]:
    """What counting needs to know of every block that `convert` would convert, in order.

    Args:
        size: frame size in pixels.
    """
    pixels = _checked_size(size)
    return tuple(
        shape
        for _, trunk, adapter in _trunks(model)
        for shape in _trunk_shapes(trunk, adapter, adapter.layout(trunk, pixels), config)
    )


def _trunk_shapes(
    trunk: nn.Module, adapter: Adapter, layout: TokenLayout, config: Config
) -> list[BlockShape]:
    return [
        adapter.spec(trunk, block).shape(layout, config)
        for _, block in adapter.blocks(trunk)
        if _reason(adapter, trunk, block) is None
    ]


def _trunk_bytes(trunk: nn.Module, adapter: Adapter, layout: TokenLayout, config: Config) -> int:
    dtype = next((p.dtype for p in trunk.parameters() if p.is_floating_point()), torch.float32)
    return state_bytes(_trunk_shapes(trunk, adapter, layout, config), config, dtype)


def find_session(model: nn.Module) -> Session | None:
    """The session of a converted model, or of the one converted model inside it."""
    found = [vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} converted models inside one; convert the whole model once instead."
        )
    return found[0] if found else None


def global_attention(session: Session) -> bool:
    """Whether the attention of every converted block is global, without relative position."""
    placed = (vars(module).get(attribute) for module, attribute, _ in session.placed)
    specs = [forward.spec for forward in placed if isinstance(forward, BlockForward)]
    return not any(spec.window or spec.relative for spec in specs)


def _refuse_wrappers(model: nn.Module) -> None:
    for _, trunk, adapter in _trunks(model):
        parts = [trunk, *(block for _, block in adapter.blocks(trunk))]
        refuse_wrappers(model, parts, "eventful.Stream(eventful.convert(model))")


def _trunks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    claimed: list[str] = []
    for name, module in model.named_modules():
        if any(name == done or name.startswith(f"{done}.") or done == "" for done in claimed):
            continue
        adapter = next((a for a in adapters() if a.matches(module)), None)
        if adapter is not None:
            claimed.append(name)
            yield name, module, adapter


def _reason(adapter: Adapter, trunk: nn.Module, block: nn.Module) -> str | None:
    try:
        adapter.spec(trunk, block)
    except Mismatch as mismatch:
        return str(mismatch)
    return mixed_tokens(block, partial(adapter.spec, trunk))


def _explain(model: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> str:
    seen = _block_matches(model)
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
    types = sorted({type(child).__name__ for child in model.modules()})
    known = ", ".join(adapter.name for adapter in adapters())
    return (
        f"No known vision transformer inside {type(model).__name__}. Known families: {known}. "
        f"Module types seen: {', '.join(types[:40])}. Teach eventful another family with "
        "eventful.register_adapter (docs/adapters.md)."
    )


def _block_matches(model: nn.Module) -> list[BlockMatch]:
    """Every block of every known trunk, matched or not."""
    return [
        BlockMatch(
            _join(name, short), type(block).__name__, adapter.name, _reason(adapter, trunk, block)
        )
        for name, trunk, adapter in _trunks(model)
        for short, block in adapter.blocks(trunk)
    ]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _clone(module: nn.Module, done: dict[int, nn.Module] | None = None) -> nn.Module:
    """A new module tree over the same parameters, buffers and hyper-parameters.

    The dicts of parameters and buffers themselves are shared, so the two trees stay in
    step when weights are loaded, moved or replaced through either.
    """
    done = {} if done is None else done
    if id(module) in done:
        return done[id(module)]
    if isinstance(module, torch.jit.ScriptModule):  # fixed code, in which nothing is converted
        return module
    # A traced graph has a class of its own, and making another object makes another class.
    make = object if isinstance(module, torch.fx.GraphModule) else module.__class__
    twin: nn.Module = make.__new__(module.__class__)
    done[id(module)] = twin
    for key, value in vars(module).items():
        if key == "_modules":
            twins = {n: None if m is None else _clone(m, done) for n, m in value.items()}
            vars(twin)[key] = type(value)(twins)
        elif key.endswith("_hooks") or key.startswith(("_forward_hooks", "_forward_pre_hooks")):
            vars(twin)[key] = copy.copy(value)
        else:
            vars(twin)[key] = value
    return twin
