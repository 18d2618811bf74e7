"""A handful of frames of a run as pictures, spread over all of it, whatever its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from eventful.pipeline.history import Still

SHOWN = 6  # of the whole run
_HELD = 12  # of each source while it runs
_WIDEST = 960  # pixels


class Stills:
    """Keeps frames of each source at even distances; the distance grows with the run."""

    def __init__(self) -> None:
        self._held: dict[str, list[Still]] = {}
        self._steps: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def offer(self, source: str, make: Callable[[], Still]) -> None:
        """Take a frame if it is one of those to keep; `make` is called only then."""
        seen = self._seen.get(source, 0)
        self._seen[source] = seen + 1
        held, step = self._held.setdefault(source, []), self._steps.setdefault(source, 1)
        if seen % step:
            return
        held.append(_smaller(make()))
        if len(held) > _HELD:
            del held[1::2]
            self._steps[source] = 2 * step

    def chosen(self) -> list[Still]:
        """Some of them, of every source, in turn; without the first where there are others.

        In a first frame every token is computed, which shows nothing.
        """
        each = max(1, -(-SHOWN // max(1, len(self._held))))
        found = []
        for held in self._held.values():
            later = held[1:] or held
            last = len(later) - 1
            places = {round(i * last / max(each - 1, 1)) for i in range(each)}
            found += [later[place] for place in sorted(places)]
        return found


def _smaller(still: Still) -> Still:
    """The same with pictures of moderate size."""
    return replace(
        still,
        eventful=_shrunk(still.eventful),
        dense=None if still.dense is None else _shrunk(still.dense),
    )


def _shrunk(picture: Tensor) -> Tensor:
    height, width = int(picture.shape[1]), int(picture.shape[2])
    if width <= _WIDEST:
        return picture
    size = (max(1, round(height * _WIDEST / width)), _WIDEST)
    return F.interpolate(picture[None], size, mode="bilinear", antialias=True)[0]
