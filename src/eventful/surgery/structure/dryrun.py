"""Runs a model on random frames with its blocks left out: how tokens lie, and who uses them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.clones import bare_tree
from eventful.surgery.structure.proof import described
from eventful.surgery.structure.tape import first_tensor
from eventful.tokens.layout import TokenLayout

_SIZES = (224, 256, 384, 336, 518, 512, 448, 64, 32)
_MIXED = 6  # most special tokens that depend on the frame, and one
_SIZE_NAMES = ("img_size", "image_size", "input_size", "pretrain_image_size")


@dataclass(frozen=True)
class Facts:
    """How the tokens of a list of blocks lie.

    Attributes:
        size: frame (height, width) that they were found with.
        grid: of tokens for that size; (0, 0) where it is not known.
        reason: why they cannot be used; None if they can.
    """

    size: tuple[int, int]
    grid: tuple[int, int] = (0, 0)
    prefix: int = 0
    suffix: int = 0
    reason: str | None = None

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
    """What the first block of a list got."""

    tokens: Tensor | None = None
    extra: str | None = None
    times: int = 0
    differ: bool = False


@dataclass
class Stub:
    """Stands for a block in a dry run: notes what it gets and passes the tokens on.

    Attributes:
        returns: see `Recipe.returns`; False for a block that runs as it is.
    """

    block: nn.Module
    returns: int | bool | None
    seen: _Seen = field(default_factory=_Seen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the block takes, return what it returns."""
        seen = self.seen
        seen.times += 1
        seen.tokens = first_tensor((*args, *kwargs.values()))
        seen.extra = seen.extra or extra_argument(self.block, args, kwargs)
        if self.returns is False:
            return type(self.block).forward(self.block, *args, **kwargs)
        assert seen.tokens is not None
        return as_returned(seen.tokens.clone(), self.returns)


def as_returned(tokens: Tensor, returns: int | None) -> Any:
    """Tokens as a block returns them."""
    return tokens if returns is None else (tokens, *([None] * (returns - 1)))


def extra_argument(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The name of an argument that says something beside the tokens; None without one."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    defaults = {p.name: p.default for p in parameters}
    given = dict(zip(names[1:], args[1:], strict=False))
    given |= {name: value for name, value in kwargs.items() if not names or name != names[0]}
    for name, value in given.items():
        if value is None or value is False:
            continue
        if not isinstance(value, Tensor) and value is defaults.get(name):
            continue
        if isinstance(value, dict | tuple | list) and not value:
            continue
        return name
    return None


def facts_of(frames: nn.Module, lists: Sequence[Sequence[str]]) -> list[Facts]:
    """How the tokens of each list of blocks lie, by a dry run of the part that takes frames.

    Args:
        lists: names of the blocks of each list, relative to `frames`.
    """
    if not any(_returns(frames.get_submodule(n)) is not False for names in lists for n in names):
        # No block can be described, so nothing is left to know.
        return [Facts(_sizes(frames)[0])] * len(lists)
    try:
        size, seen = _first_run(frames, lists)
    except Mismatch as reason:
        return [Facts(_sizes(frames)[0], reason=str(reason))] * len(lists)
    found = []
    for one in seen:
        try:
            found.append(_facts(one, size))
        except Mismatch as reason:
            found.append(Facts(size, reason=str(reason)))
    return _ordered(frames, lists, found)


def _first_run(
    frames: nn.Module, lists: Sequence[Sequence[str]]
) -> tuple[tuple[int, int], list[_Seen]]:
    """Run two random frames of a size that the model takes."""
    error: Exception | None = None
    for size in _sizes(frames):
        try:
            return size, run_stubs(frames, lists, _pictures(frames, size, 2))
        except Exception as raised:  # the model's own code on a size it may not take
            error = error or raised
    text = str(error).strip().partition("\n")[0][:160]
    raise Mismatch(
        f"the {type(frames).__name__} around it does not run on a frame alone: "
        f"{type(error).__name__}: {text}"
    )


def run_stubs(frames: nn.Module, lists: Sequence[Sequence[str]], pictures: Tensor) -> list[_Seen]:
    """Run the part that takes frames with stubs for its blocks; what each list's first one got."""
    twin = bare_tree(frames).eval()
    firsts = []
    for names in lists:
        stubs = []
        for name in names:
            block = twin.get_submodule(name)
            stubs.append(Stub(block, _returns(block)))
            vars(block)["forward"] = stubs[-1]
        firsts.append(stubs)
    with torch.no_grad():
        twin(pictures)
    return [_joined([stub for stub in stubs if stub.returns is not False]) for stubs in firsts]


def _joined(stubs: list[Stub]) -> _Seen:
    """What the first of a list's blocks that can be described got, and what is wrong of any."""
    if not stubs:
        return _Seen()
    seen = stubs[0].seen
    shapes = {None if stub.seen.tokens is None else stub.seen.tokens.shape for stub in stubs}
    seen.times = max(stub.seen.times for stub in stubs)
    seen.extra = next((stub.seen.extra for stub in stubs if stub.seen.extra), None)
    seen.differ = len(shapes) > 1
    return seen


def _returns(block: nn.Module) -> int | bool | None:
    try:
        return described(block).returns
    except Mismatch:
        return False


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


def _facts(seen: _Seen, size: tuple[int, int]) -> Facts:
    """The layout that follows from the tokens of two frames that differ everywhere."""
    if seen.tokens is None:
        raise Mismatch("it is not called on a frame")
    if seen.times > 1:
        raise Mismatch("it is called more than once on a frame")
    if seen.extra is not None:
        raise Mismatch(f"it gets `{seen.extra}` beside its tokens")
    if seen.differ:
        raise Mismatch("its list has blocks with other numbers of tokens")
    tokens = seen.tokens
    if tokens.dim() not in (3, 4) or len(tokens) != 2:
        raise Mismatch("its tokens do not come as (frames, tokens, channels)")
    if tokens.dim() == 4:
        return Facts(size, (tokens.shape[1], tokens.shape[2]))
    changed = (tokens[0] != tokens[1]).any(dim=-1).nonzero().flatten().tolist()
    if not changed:
        raise Mismatch("its tokens do not depend on the frame")
    prefix, suffix = changed[0], tokens.shape[1] - 1 - changed[-1]
    count = len(changed)
    if prefix + count + suffix != tokens.shape[1]:
        raise Mismatch("special tokens lie between its patches")
    # A special token that has seen the patches, in a block before, changes as they do.
    for mixed in range(_MIXED):
        height = round(math.sqrt((count - mixed) * size[0] / size[1]))
        if height and (count - mixed) % height == 0:
            width = (count - mixed) // height
            if abs(width - height * size[1] / size[0]) < 1:
                return Facts(size, (height, width), prefix + mixed, suffix)
    raise Mismatch(f"{count} tokens of a frame of {size[0]} x {size[1]} px form no grid")


def _ordered(frames: nn.Module, lists: Sequence[Sequence[str]], found: list[Facts]) -> list[Facts]:
    """The facts, with a reason where tokens do not lie row by row.

    Of each list, a frame is changed at the place of its second token, and one at the place of the
    first token of its second row.
    """
    big = [i for i, one in enumerate(found) if one.reason is None and min(one.grid) > 1]
    if not big:
        return found
    pictures = _pictures(frames, found[big[0]].size, 1).repeat(1 + 2 * len(big), 1, 1, 1)
    for at, i in enumerate(big):
        (height, width), (rows, columns) = found[i].size, found[i].grid
        down, across = height // rows, width // columns
        pictures[1 + 2 * at, :, :down, across : 2 * across] += 1
        pictures[2 + 2 * at, :, down : 2 * down, :across] += 1
    seen = run_stubs(frames, lists, pictures)
    for at, i in enumerate(big):
        tokens, first, columns = seen[i].tokens, found[i].prefix, found[i].grid[1]
        assert tokens is not None
        flat = tokens.flatten(1, -2)
        beside, below = ((flat[1 + 2 * at + n] != flat[0]).any(dim=-1) for n in (0, 1))
        if not (beside[first + 1] and below[first + columns]):
            found[i] = Facts(found[i].size, reason="its tokens do not lie row by row")
    return found


def loop_is_plain(
    frames: nn.Module, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether a call of the part that takes frames passes each block's output to the next alone.

    Args:
        names: of the blocks, relative to `frames`.
    """
    twin = bare_tree(frames).eval()
    watch = _Watch()
    for at, name in enumerate(names):
        block = twin.get_submodule(name)
        vars(block)["forward"] = watch.stub(block, at, at + 1 == len(names))
    with torch.no_grad(), watch:
        result = twin(*args, **kwargs)
    kept = any(output() is not None for output in watch.outputs)
    del result
    return watch.plain and not kept and watch.next == len(names)


class _Watch(TorchFunctionMode):
    """Notes where an output of a block, but for the last one's, is used outside the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = True
        self.next = 0
        self.inside = False
        self.outputs: list[ref[Tensor]] = []

    def stub(self, block: nn.Module, at: int, last: bool) -> Callable[..., Any]:
        """The forward of the block at a place in the list."""
        returns = _returns(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = first_tensor((*args, *kwargs.values()))
            assert tokens is not None
            before = self.outputs[-1]() if self.outputs else None
            self.plain &= self.next == at and (at == 0 or tokens is before)
            self.next = at + 1
            self.inside = True
            made = tokens.clone()
            self.inside = False
            if not last:
                self.outputs.append(ref(made))
            assert returns is not False
            return as_returned(made, returns)

        return forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside and getattr(func, "__name__", "") != "__get__":
            known = {id(output()) for output in self.outputs} - {id(None)}
            values = [*args, *kwargs.values()]
            flat = [e for v in values for e in (v if isinstance(v, tuple | list) else [v])]
            self.plain &= not any(id(value) in known for value in flat)
        return func(*args, **kwargs)
