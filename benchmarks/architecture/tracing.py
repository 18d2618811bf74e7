"""Calls between the modules of eventful while one frame is stepped."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import eventful
from eventful.cost.times import use_clock
from eventful.engine import plan
from eventful.surgery.libraries import load

SOURCE = Path(eventful.__file__).parent
WARM = 8  # frames ahead of the traced one: shapes, recordings and the noise level are settled
SIZE, PATCH = 64, 8
_SHORT = {"of", "run", "call", "_run", "<lambda>"}
_INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # part of the code around them


@dataclass
class Call:
    """One call of a function of eventful.

    Attributes:
        caller: the nearest function of eventful on the stack, whatever lies between; None for the
            first.
        file: path below the package.
        start, end: number of calls begun before it, and before its end.
    """

    caller: Call | None
    file: str
    function: str
    start: int
    end: int = 0
    inner: list[Call] = field(default_factory=list, repr=False)

    @property
    def package(self) -> str:
        """The package, or the module that stands alone."""
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def name(self) -> str:
        """The function, with its class where the name alone says little; of `ops` the operation."""
        served = [inner for inner in self.inner if inner.file != self.file]
        if self.file == "ops/registry.py" and served:
            return served[0].name
        parts = [part for part in self.function.split(".") if part != "<locals>"]
        plain = parts[-1] not in _SHORT and not parts[-1].startswith("__")
        return parts[-1] if plain else ".".join(parts[-2:])

    @property
    def above(self) -> Iterator[Call]:
        """Its callers, the nearest first."""
        at = self.caller
        while at is not None:
            yield at
            at = at.caller


def traced(run: Callable[[], Any]) -> list[Call]:
    """The calls of eventful's own functions while `run` runs, in order."""
    calls: list[Call] = []
    stack: list[Call] = []
    root = f"{SOURCE}/"

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(root) or code.co_name in _INLINE:
            return
        if event == "call":
            caller = stack[-1] if stack else None
            file = code.co_filename.removeprefix(root)
            made = Call(caller, file, code.co_qualname, len(calls))
            if caller is not None:
                caller.inner.append(made)
            calls.append(made)
            stack.append(made)
        elif event == "return" and stack:
            stack.pop().end = len(calls)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def steady_frame(
    way: str, device: str = "cpu", config: eventful.Config | None = None
) -> list[Call]:
    """Step a small converted timm ViT until it is steady, and trace one more frame.

    Args:
        way: `host`, or `device` for the steps of a GPU; without one these run on the CPU.
        config: `Config.fast()` if left out.
    """
    torch.manual_seed(7)
    vit: Any = load("timm.models.vision_transformer")
    model = vit.VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=32, depth=2, num_heads=2, num_classes=0
    )
    frames = [frame.to(device) for frame in clip(WARM + 1)]
    # A clock that stands still: whether a step runs dense must not depend on this machine.
    with _steps_of({device} if way == "device" else set()), use_clock(lambda: 0.0):
        stream = eventful.Stream(eventful.convert(model.eval().to(device), config))
        for frame in frames[:-1]:
            stream(frame)
        calls = traced(lambda: stream(frames[-1]))
        stream.close()
    return calls


def clip(count: int) -> list[torch.Tensor]:
    """Frames (1, 3, H, W) of a noisy scene in which a small patch moves."""
    make = torch.Generator().manual_seed(0)
    scene = torch.rand(1, 3, SIZE, SIZE, generator=make)
    frames = []
    for t in range(count):
        frame = scene.clone()
        frame[..., PATCH * (t % 4) : PATCH * (t % 4 + 1), : 2 * PATCH] = 0.5
        frames.append(frame + 0.01 * torch.randn(frame.shape, generator=make))
    return frames


@contextlib.contextmanager
def _steps_of(devices: set[str]) -> Iterator[None]:
    """Have steps on these devices run without waiting for the host."""
    before = plan.DEVICES
    plan.DEVICES = devices
    try:
        yield
    finally:
        plan.DEVICES = before


def file_changes(calls: Sequence[Call]) -> int:
    """Calls into another file."""
    return sum(call.caller is not None and call.caller.file != call.file for call in calls)


def package_changes(calls: Sequence[Call]) -> int:
    """Calls into another package."""
    return sum(call.caller is not None and call.caller.package != call.package for call in calls)


def upward(calls: Sequence[Call], layer_of: dict[str, int]) -> list[Call]:
    """Calls from a lower layer into a higher one."""
    return [
        call
        for call in calls
        if call.caller is not None and layer_of[call.package] > layer_of[call.caller.package]
    ]


def folded(calls: Sequence[Call], below: set[str]) -> list[str]:
    """The calls as an indented tree, a line for each call that calls others.

    What happens inside the packages `below` is left out: a line ends with the number of calls into
    each of them. A part of the tree that appears again is named and not repeated.
    """
    seen: set[tuple[Any, ...]] = set()

    def shape(call: Call) -> tuple[Any, ...]:
        return (call.file, call.function, *(shape(inner) for inner in call.inner))

    def lines(call: Call, depth: int) -> Iterator[str]:
        kept = [inner for inner in call.inner if inner.inner and inner.package not in below]
        into = Counter(inner.package for inner in call.inner if inner.package in below)
        notes = [f"{package} {count}" for package, count in sorted(into.items())]
        form = shape(call)
        again = form in seen and bool(kept or notes)
        seen.add(form)
        end = "  as above" if again else f"  -> {', '.join(notes)}" if notes else ""
        yield f"{'  ' * depth}{call.file}  {call.name}{end}"
        for inner in () if again else kept:
            yield from lines(inner, depth + 1)

    found = [line for call in calls if call.caller is None for line in lines(call, 0)]
    alike = ((line, len(list(group))) for line, group in groupby(found))
    return [line if count == 1 else f"{line} ({count} times)" for line, count in alike]
