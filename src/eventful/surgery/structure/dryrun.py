"""Runs a model on random frames with its blocks left out: how tokens lie, and who uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.clones import private_tree
from eventful.surgery.outputs import first_tensor
from eventful.surgery.structure.arguments import extra_argument
from eventful.surgery.structure.fingerprint import Alike, Fingerprint
from eventful.surgery.structure.layouts import Span, spans, squared_change, start_of
from eventful.surgery.structure.proof import (
    Momentary,
    described,
    differs_with,
)
from eventful.surgery.structure.randomness import same_random_state
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.state import Hidden
from eventful.tokens.layout import TokenLayout

_SIZES = (224, 256, 384, 336, 518, 512, 448, 64, 32)
_SIZE_NAMES = ("img_size", "image_size", "input_size", "pretrain_image_size")


@dataclass(frozen=True)
class Facts:
    """How the tokens of a list of blocks lie.

    Attributes:
        size: frame (height, width) that they were found with.
        grid: of tokens for that size; (0, 0) where it is not known.
        reason: why they cannot be used; None if they can.
        refused: why single blocks cannot be, in the order of the list; None for those that can.
        lasting: whether all that was found holds for later calls, too.
    """

    size: tuple[int, int]
    grid: tuple[int, int] = (0, 0)
    prefix: int = 0
    suffix: int = 0
    reason: str | None = None
    refused: tuple[str | None, ...] = ()
    lasting: bool = True

    def layout(self, size: tuple[int, int]) -> TokenLayout:
        """The layout for frames of another size."""
        if self.grid == (0, 0):
            return TokenLayout(self.grid)
        if size == self.size:
            return TokenLayout(self.grid, self.prefix, self.suffix)
        height, width = (
            side // (known // count) if known % count == 0 else round(side * count / known)
            for side, known, count in zip(size, self.size, self.grid, strict=True)
        )
        return TokenLayout((height, width), self.prefix, self.suffix)


@dataclass
class _Seen:
    """What a block got.

    Attributes:
        times: how many times it was called.
        at: when it was called first, among the blocks.
        extra: the name of an argument beside the tokens.
        state: the name of an attribute that was set since the call of the model began.
        refused: why its description does not hold for these tokens.
    """

    tokens: Tensor | None = None
    times: int = 0
    at: int = -1
    extra: str | None = None
    state: str | None = None
    refused: str | None = None


Check = Callable[[nn.Module, Recipe, tuple[int, ...]], str | None]


@dataclass
class Stub:
    """Stands for a block in a dry run: notes what it gets and passes the tokens on.

    Attributes:
        recipe: None for a block that runs as it is.
        clock: counts the calls of all blocks.
        check: proves the description for the tokens that the block gets; None to leave it out.
    """

    block: nn.Module
    recipe: Recipe | None
    clock: Iterator[int]
    check: Check | None = None
    seen: _Seen = field(default_factory=_Seen)

    def __post_init__(self) -> None:
        self.before = None if self.check is None else Fingerprint.of(self.block)
        self.hidden = Hidden(self.block, self.recipe)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the block takes, return what it returns."""
        seen = self.seen
        seen.times += 1
        seen.at = next(self.clock) if seen.at < 0 else seen.at
        tokens = seen.tokens = first_tensor((*args, *kwargs.values()))
        seen.extra = seen.extra or extra_argument(self.block, args, kwargs)
        if self.recipe is None:
            return type(self.block).forward(self.block, *args, **kwargs)
        assert tokens is not None
        if self.check is not None and self.before is not None:
            with self.hidden.shown():
                seen.state = seen.state or self.before.difference(Fingerprint.of(self.block))
                # Here, in the model's own call: what it has set, anywhere, holds in the proof, too.
                seen.refused = self.check(self.block, self.recipe, tuple(tokens.shape[1:]))
        return as_returned(tokens.clone(), self.recipe.returns)


# Runs pictures through a model with stubs for its blocks, which are returned by list.
Run = Callable[[Tensor], list[list[Stub]]]


def as_returned(tokens: Tensor, returns: int | None) -> Any:
    """Tokens as a block returns them."""
    return tokens if returns is None else (tokens, *([None] * (returns - 1)))


def facts_of(frames: nn.Module, lists: Sequence[Sequence[str]]) -> list[Facts]:
    """How the tokens of each list of blocks lie, by dry runs of the part that takes frames.

    Args:
        lists: names of the blocks of each list, relative to `frames`.
    """
    names = [name for one in lists for name in one]
    known = Recipes({name: frames.get_submodule(name) for name in names})
    unknown = Facts(_sizes(frames)[0], lasting=known.lasting)
    if not known.found:
        return [unknown] * len(lists)  # no block can be described, so nothing is left to know
    with same_random_state():
        run = partial(run_stubs, frames, lists, known)
        try:
            size, stubs = _first_run(frames, run)
        except Mismatch as reason:
            return [replace(unknown, reason=str(reason))] * len(lists)
        found, probe = [], _Probe(frames, size, run)
        for at, one in enumerate(stubs):
            try:
                found.append(probe.placed(at, one))
            except Mismatch as reason:
                found.append(Facts(size, reason=str(reason)))
        proofs = Proofs()
        found = _tried(frames, found, partial(run, check=proofs))
        lasting = known.lasting and proofs.lasting
        return [replace(one, lasting=lasting) for one in found]


class Recipes:
    """The descriptions of blocks at one moment.

    Attributes:
        found: by the name of the block; none for those that have no description.
        lasting: whether those that have none will not have one later.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.found: dict[str, Recipe] = {}
        self.lasting = True
        for name, block in blocks.items():
            try:
                self.found[name] = described(block)
            except Momentary:
                self.lasting = False
            except Mismatch:
                continue


def _first_run(frames: nn.Module, run: Run) -> tuple[tuple[int, int], list[list[Stub]]]:
    """Run two random frames of a size that the model takes."""
    error: Exception | None = None
    for size in _sizes(frames):
        try:
            return size, run(_pictures(frames, size, 2))
        except Exception as raised:  # the model's own code on a size it may not take
            error = error or raised
    text = str(error).strip().partition("\n")[0][:160]
    raise Mismatch(
        f"the {type(frames).__name__} around it does not run on a frame alone: "
        f"{type(error).__name__}: {text}"
    )


def run_stubs(
    frames: nn.Module,
    lists: Sequence[Sequence[str]],
    known: Recipes,
    pictures: Tensor,
    check: Check | None = None,
) -> list[list[Stub]]:
    """Run the part that takes frames with stubs for its blocks, which are returned."""
    twin = twin_of(frames, lists)
    clock = count()
    made = [
        [Stub(twin.get_submodule(name), known.found.get(name), clock, check) for name in names]
        for names in lists
    ]
    for stub in (stub for stubs in made for stub in stubs):
        vars(stub.block)["forward"] = stub
    with torch.no_grad():
        twin(pictures)
    return made


def twin_of(frames: nn.Module, lists: Sequence[Sequence[str]]) -> nn.Module:
    """A copy of the part that takes frames, to be run with stubs for its blocks."""
    blocks = [frames.get_submodule(name) for names in lists for name in names]
    return private_tree(frames, shared=blocks).eval()


def _pictures(frames: nn.Module, size: tuple[int, int], count: int) -> Tensor:
    conv = next((m for m in frames.modules() if isinstance(m, nn.Conv2d)), None)
    channels = 3 if conv is None else conv.in_channels
    weight = next(p for p in frames.parameters() if p.is_floating_point())
    make = torch.Generator().manual_seed(3)
    made = torch.rand(count, channels, *size, generator=make)
    return made.to(weight.device, weight.dtype)


def _sizes(frames: Foreign) -> list[tuple[int, int]]:
    """Frame sizes to try: those that the model states, then usual ones."""
    stated: list[Any] = []
    trained: list[Any] = []
    for module in frames.modules():
        for holder in (module, getattr(module, "config", None)):
            stated += [getattr(holder, name, None) for name in _SIZE_NAMES]
        for config in ("pretrained_cfg", "default_cfg"):
            held = getattr(module, config, None)
            if isinstance(held, dict):
                trained.append(tuple(held.get("input_size", ()))[-2:])
    pairs = [(one, one) if isinstance(one, int) else one for one in (*stated, *trained)]
    found = [
        (int(pair[0]), int(pair[1]))
        for pair in pairs
        if isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_whole, pair))
    ]
    return list(dict.fromkeys([*found[:4], *((side, side) for side in _SIZES)]))


def _whole(side: object) -> bool:
    return isinstance(side, int) and side > 0


class _Probe:
    """How much the tokens of each list change where parts of a frame are exchanged."""

    def __init__(self, frames: nn.Module, size: tuple[int, int], run: Run) -> None:
        self.size, self.run = size, run
        self.two = _pictures(frames, size, 2)
        self.known: dict[bytes, list[Tensor]] = {}  # lists of one grid share their pictures

    def placed(self, at: int, stubs: Sequence[Stub]) -> Facts:
        """The layout of the tokens of a list."""
        tokens = _checked(stubs)
        for span in _spans(tokens, self.size):
            start = start_of(span, self.size, partial(self.changes, at))
            if start is not None:
                after = tokens.flatten(1, -2).shape[1] - start - span.grid[0] * span.grid[1]
                return Facts(self.size, span.grid, start, after)
        raise Mismatch("its tokens do not lie row by row, each where its patch is in the frame")

    def changes(self, at: int, pixels: Tensor) -> Tensor:
        """See `layouts.Changes`, of the list at a place."""
        key = pixels.numpy().tobytes()
        if key not in self.known:
            parts = torch.cat([torch.zeros_like(pixels[:1]), pixels])[:, None].to(self.two)
            runs = self.run(torch.lerp(self.two[:1], self.two[1:], parts))
            self.known[key] = [_change(_first(stubs)) for stubs in runs]
        return self.known[key][at]


def _change(stub: Stub) -> Tensor:
    tokens = stub.seen.tokens
    return torch.empty(0) if tokens is None else squared_change(tokens.flatten(1, -2))


def _first(stubs: Sequence[Stub]) -> Stub:
    """The first block of a list that can be described."""
    return next((stub for stub in stubs if stub.recipe is not None), stubs[0])


def _checked(stubs: Sequence[Stub]) -> Tensor:
    """What the first block of a list got, if all of them are called as is expected."""
    known = [stub.seen for stub in stubs if stub.recipe is not None]
    if not known:
        raise Mismatch("no block of its list can be described")
    tokens = known[0].tokens
    if tokens is None:
        raise Mismatch("it is not called on a frame")
    if any(seen.times > 1 for seen in known):
        raise Mismatch("it is called more than once on a frame")
    extra = next((seen.extra for seen in known if seen.extra is not None), None)
    if extra is not None:
        raise Mismatch(f"it gets `{extra}` beside its tokens")
    if any(seen.tokens is None for seen in known):
        raise Mismatch("its list has blocks that are not called on a frame")
    if len({seen.tokens.shape for seen in known if seen.tokens is not None}) > 1:
        raise Mismatch("its list has blocks with other numbers of tokens")
    order = [stub.seen.at for stub in stubs if stub.seen.at >= 0]
    if order != sorted(order):
        raise Mismatch("the blocks of its list are called in another order than they are listed")
    if tokens.dim() not in (3, 4) or len(tokens) != 2:
        raise Mismatch("its tokens do not come as (frames, tokens, channels)")
    return tokens


def _spans(tokens: Tensor, size: tuple[int, int]) -> list[Span]:
    """Which of the tokens of two frames that differ everywhere may form a grid."""
    if tokens.dim() == 4:
        return [Span((tokens.shape[1], tokens.shape[2]), range(1))]
    changed = (tokens[0] != tokens[1]).any(dim=-1).nonzero().flatten().tolist()
    if not changed:
        raise Mismatch("its tokens do not depend on the frame")
    if changed[-1] - changed[0] + 1 != len(changed):
        raise Mismatch("special tokens lie between its patches")
    found = list(spans(changed[0], len(changed), size))
    if not found:
        raise Mismatch(f"{len(changed)} tokens of a frame of {size[0]} x {size[1]} px form no grid")
    return found


def _tried(frames: nn.Module, found: list[Facts], run: Run) -> list[Facts]:
    """The facts, with reasons of blocks that do something else in the model than alone."""
    usable = [one for one in found if one.reason is None]
    if not usable:
        return found
    picture = _pictures(frames, usable[0].size, 1)
    for at, stubs in enumerate(run(picture)):
        if found[at].reason is None:
            found[at] = replace(found[at], refused=tuple(map(_reason, stubs)))
    return found


def _reason(stub: Stub) -> str | None:
    if stub.seen.state is not None:
        return f"the model sets its `{stub.seen.state}` when it is called"
    return stub.seen.refused


class Proofs:
    """Checks blocks with as many tokens as a model has; those that differ in weights alone at once.

    Attributes:
        lasting: whether all that was found holds for later calls, too.
    """

    def __init__(self) -> None:
        self._known: Alike[str] = Alike()
        self.lasting = True

    def __call__(self, block: nn.Module, recipe: Recipe, shape: tuple[int, ...]) -> str | None:
        """Why a block's description does not hold for tokens of a shape; None if it does."""
        now = Fingerprint.of(block)
        found = self._known.get(now, shape)
        if found is None:
            try:
                found = differs_with(block, recipe, shape) or ""
            except Momentary as reason:
                self.lasting = False
                return str(reason)
            self._known.put(now, found, shape)
        return found or None
