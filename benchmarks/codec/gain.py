"""What a prior of unchanged tokens gains end to end: prototypes beside the product, in turn.

Every contender decodes, scales, normalises and steps each frame itself, in one thread, as soon as
the contender before it has done so. The prototypes patch the host path of one stream and are not
part of the package:

`compared`  compares the pixels of each patch with the last frame, and embeds the patches that
            changed;
`known`     is given this mask: what a codec could say at best, at no cost;
`known, errors kept`  also computes the error only of tokens whose patch or reference changed;
`known, not scaled`   is given the mask and the pixels: of reading a frame, decoding is left.

`again` is the product once more: how much two equal runs differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eventful
from benchmarks.codec.blocks import PATCH
from benchmarks.codec.parts import Now
from eventful import ops
from eventful.bench.timing import in_turn
from eventful.rules import block
from eventful.surgery import patches
from eventful.video.address import find_source
from eventful.video.decoders import Picture
from eventful.video.fitting import Fitting
from eventful.video.normalization import choose_normalization
from eventful.video.pyav import AvDecoder

WARM = 4
PRODUCT, AGAIN = "product", "again"
COMPARED, KNOWN, KEPT, UNSCALED = "compared", "known", "known, errors kept", "known, not scaled"
CONTENDERS = (PRODUCT, AGAIN, COMPARED, KNOWN, KEPT, UNSCALED)


class Prior:
    """Embeds the patches that changed, and keeps what is known of the others, for one stream.

    Args:
        masks: (h * w) bool of each frame but the first, patches that changed; None to compare.
        errors: keep the errors, too.
    """

    def __init__(self, masks: Sequence[Tensor] | None, *, errors: bool) -> None:
        self.masks, self.errors = masks, errors
        self.frame = -1
        self.last: Tensor | None = None
        self.content = self.error = torch.empty(0)
        self.changed = self.stale = torch.empty(0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Steps of any stream go through this prior."""
        parts: list[tuple[Any, str, Any]] = [(patches.PatchForward, "__call__", self._embedding())]
        if self.errors:
            parts += [
                (block, "follow_motion", self._following(block.follow_motion)),
                (block, "choose", self._choosing(block.choose)),
                (ops, "error_norm", self._errors(ops.error_norm)),
            ]
        with ExitStack() as stack:
            for owner, name, made in parts:
                stack.enter_context(patch.object(owner, name, made))
            yield

    def _embedding(self) -> Any:
        def embed(forward: patches.PatchForward, image: Tensor) -> Tensor:
            self.frame += 1
            module, size = forward.module, forward.module.kernel_size
            rows, columns = (side // edge for side, edge in zip(image.shape[2:], size, strict=True))
            cells = image.view(3, rows, size[0], columns, size[1])
            if self.frame == 0:
                whole = nn.Conv2d.forward(module, image)
                self.content = whole.flatten(2).transpose(1, 2)[0].contiguous()
                self.changed = torch.ones(rows * columns, dtype=torch.bool)
            else:
                self.changed = self._mask(image, cells)
                index = self.changed.nonzero()[:, 0]
                if len(index):
                    few = cells[:, index // columns, :, index % columns].flatten(1)
                    self.content.index_copy_(
                        0, index, F.linear(few, module.weight.flatten(1), module.bias)
                    )
            self.last = image
            result = self.content[None].transpose(1, 2).unflatten(2, (rows, columns))
            patches.see(forward.session.step, forward.trunk, image, result)
            return result

        return embed

    def _mask(self, image: Tensor, cells: Tensor) -> Tensor:
        """(h * w) patches that changed."""
        if self.masks is not None:
            return self.masks[self.frame - 1]
        assert self.last is not None
        return (image != self.last).view(cells.shape).any(4).any(2).any(0).flatten()

    def _following(self, original: Any) -> Any:
        def follow(step: Any, spec: Any, tokens: Tensor) -> Tensor:
            made: Tensor = original(step, spec, tokens)
            motion = step.motions.get(spec.trunk)
            self.stale = self.changed
            if motion is not None:  # their references came from elsewhere
                self.stale = self.changed | (motion != 0).any(dim=-1).flatten()
            return made

        return follow

    def _errors(self, original: Any) -> Any:
        def error(current: Tensor, reference: Tensor, order: float, slots: Any = None) -> Tensor:
            prefix = current.shape[1] - len(self.stale)
            index = torch.cat([torch.arange(prefix), self.stale.nonzero()[:, 0] + prefix])
            self.error[:, index] = original(current[:, index], reference[:, index], order)
            return self.error.clone()

        return error

    def _choosing(self, original: Any) -> Any:
        def choose(step: Any, spec: Any, kind: str, current: Tensor) -> Any:
            if not len(self.error):
                self.error = torch.zeros(current.shape[:2])
            selection = original(step, spec, kind, current)
            self.error.scatter_(1, selection.index, 0.0)
            return selection

        return choose


class Clip:
    """The first frames of a video at the size of a model, and which of their patches changed."""

    def __init__(self, path: Path, size: tuple[int, int], frames: int) -> None:
        self.path = path
        self.fitting = Fitting(size, "stretch", 1, choose_normalization(None))
        self.given = list(islice(self.frames(), frames))
        grid = (3, size[0] // PATCH, PATCH, size[1] // PATCH, PATCH)
        self.masks = [
            (now != then).view(grid).any(4).any(2).any(0).flatten()
            for then, now in pairwise(self.given)
        ]

    def frames(self) -> Iterator[Tensor]:
        """Every frame, decoded, scaled and normalised when it is asked for."""
        for picture in self._pictures():
            layout = self.fitting.layout(picture.height, picture.width)
            yield self.fitting.pixels(layout, picture.draw(*layout.scaled))

    def decoded(self) -> Iterator[Tensor]:
        """The same frames, of which only the decoding is done when they are asked for."""
        for _, frame in zip(self._pictures(), self.given, strict=False):
            yield frame

    def _pictures(self) -> Iterator[Picture]:
        # `live` decodes in the thread that asks, and not ahead.
        source = find_source(self.path)
        return AvDecoder(source, timeout=10.0, motion=False, live=True).pictures()


@dataclass
class Run:
    """One contender on one clip."""

    frames: Iterator[Tensor]
    stream: eventful.Stream
    now: Now
    prior: Prior | None = None
    ms: list[float] = field(default_factory=list)
    updated: list[float] = field(default_factory=list)
    dense: int = 0
    furthest: float = 0.0

    def step(self) -> Tensor:
        """One frame, from the file to the features."""
        with nullcontext() if self.prior is None else self.prior.installed():
            began = self.now()
            output: Tensor = self.stream(next(self.frames))
            self.ms.append((self.now() - began) * 1000)
        assert self.stream.last is not None
        self.updated.append(self.stream.last.fraction)
        self.dense += self.stream.last.fallback
        return output


def _runs(clip: Clip, model: nn.Module, now: Now) -> dict[str, Run]:
    runs = {}
    for name in CONTENDERS:
        prior = None
        if name not in (PRODUCT, AGAIN):
            prior = Prior(None if name == COMPARED else clip.masks, errors=name == KEPT)
        frames = clip.decoded() if name == UNSCALED else clip.frames()
        runs[name] = Run(frames, eventful.Stream(model), now, prior)
    return runs


def gain_of(clip: Clip, model: nn.Module, rounds: int, now: Now) -> dict[str, Any]:
    """Times as shares of the product's, and what the contenders changed.

    Of the rounds, the shortest time of each frame counts: other processes only lengthen it.

    Returns:
        Beside others, for each contender `ratio`, of the sums over frames, `middle`, the median
        of the ratios of single frames, and `furthest`, the largest difference of an output from
        the product's as a share of the largest output.
    """
    done = [_round(clip, model, turn, now) for turn in range(rounds)]
    ms = {
        name: [min(times) for times in zip(*(runs[name].ms for runs in done), strict=True)][WARM:]
        for name in CONTENDERS
    }
    own, product = ms[PRODUCT], done[0][PRODUCT]
    rows = {}
    for name in CONTENDERS[1:]:
        rows[name] = {
            "ratio": sum(ms[name]) / sum(own),
            "middle": median(a / b for a, b in zip(ms[name], own, strict=True)),
            "ms": median(ms[name]),
            "furthest": max(runs[name].furthest for runs in done),
            "same_counts": all(runs[name].updated == product.updated for runs in done),
        }
    return {
        "frames": len(clip.given),
        "rounds": rounds,
        "ms": median(own),
        "ms_mean": sum(own) / len(own),
        "updated": sum(product.updated[WARM:]) / len(own),
        "unchanged": 1 - sum(float(mask.float().mean()) for mask in clip.masks) / len(clip.masks),
        "dense_steps": {name: run.dense for name, run in done[0].items()},
        "contenders": rows,
    }


def _round(clip: Clip, model: nn.Module, turn: int, now: Now) -> dict[str, Run]:
    """Every contender on every frame, in turn."""
    runs = _runs(clip, model, now)
    for number in range(len(clip.given)):
        made = {name: runs[name].step() for name in in_turn(CONTENDERS, number + turn)}
        expected = made[PRODUCT]
        for name, output in made.items():
            apart = float((output - expected).abs().max() / expected.abs().max())
            runs[name].furthest = max(runs[name].furthest, apart)
    for run in runs.values():
        run.stream.close()
    return runs
