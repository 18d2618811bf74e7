"""Where the time of a frame goes at the default settings, from the file to the features."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from torch import nn

import eventful
from eventful import ops
from eventful.rules import block, context, motion
from eventful.surgery import patches
from eventful.video.fitting import Fitting
from eventful.video.normalization import choose_normalization
from eventful.video.pyav import AvDecoder

Now = Callable[[], float]
WARM = 4
# What is timed under which name. A part that is inside another one is taken out of it.
_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("embedding", patches.PatchForward, "__call__"),
    ("error", ops, "error_norm"),
    ("gate, without the error", block, "choose"),
    ("motion", patches, "see"),
    ("motion", block, "follow_motion"),
    ("motion", block, "keep_picture"),
    ("motion", motion, "carry"),
    ("motion", block, "carry"),
    ("context", context, "swap_keys"),
    ("context", context, "_add_context"),
    ("blocks", block, "_whole"),
    ("output and estimate", block, "note_change"),
)


class Clock:
    """Milliseconds of the parts of each frame, each without the parts inside it.

    Args:
        now: seconds, of the wall or of the processor.
    """

    def __init__(self, now: Now) -> None:
        self._now = now
        self.ms: dict[str, float] = defaultdict(float)
        self._inside = [0.0]
        self._frames: list[dict[str, float]] = []

    def frame(self) -> None:
        """A frame ends."""
        self._frames.append(dict(self.ms))
        self.ms.clear()

    def medians(self) -> dict[str, float]:
        """Each part's median over all frames but the first ones."""
        steady = self._frames[WARM:]
        names = {name: None for frame in steady for name in frame}
        return {name: median(frame.get(name, 0.0) for frame in steady) for name in names}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part."""
        began = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = (self._now() - began) * 1000
            self.ms[name] += took - self._inside.pop()
            self._inside[-1] += took

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed


def parts_of(
    path: Path, model: nn.Module, size: tuple[int, int], frames: int, now: Now
) -> dict[str, float | int]:
    """Milliseconds of each part of a frame, medians over frames after the first ones.

    A median leaves out the dense steps and what other processes took.
    """
    reading = _reading(path, size, frames, now)
    clock, stream = Clock(now), eventful.Stream(model)
    updated: list[float] = []
    fell_back = 0
    with ExitStack() as stack, eventful.read(path, size, fit="stretch") as reader:
        for name, owner, attribute in _PARTS:
            timed = clock.around(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, timed))
        given = [frame.clone() for frame in islice(reader, frames)]
        for frame in given:
            with clock.part("the rest of a step"):
                stream(frame)
            clock.frame()
            assert stream.last is not None
            updated.append(stream.last.fraction)
            fell_back += stream.last.fallback
    stream.close()
    count = len(updated) - WARM
    parts = {**reading, **clock.medians()}
    return {
        **parts,
        "total": sum(parts.values()),
        "updated": sum(updated[WARM:]) / count,
        "dense_steps": fell_back,
    }


def _reading(path: Path, size: tuple[int, int], frames: int, now: Now) -> dict[str, float]:
    """Milliseconds of decoding, scaling and normalising a frame, one after another, no thread."""
    from eventful.video.address import find_source

    clock, fitting = Clock(now), Fitting(size, "stretch", 1, choose_normalization(None))
    decoder = AvDecoder(find_source(path), timeout=10.0, motion=False, live=True)
    pictures = decoder.pictures()
    for _ in range(frames):
        with clock.part("decoding"):
            picture = next(pictures, None)
        if picture is None:
            break
        layout = fitting.layout(picture.height, picture.width)
        with clock.part("scaling"):
            planes = picture.draw(*layout.scaled)
        with clock.part("normalising"):
            fitting.pixels(layout, planes)
        clock.frame()
    decoder.close()
    return clock.medians()
