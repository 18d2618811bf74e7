"""Dense heads of transformers that keep their maps in a stream: Depth Anything, DPT.

The neck and the head of these models are described as graphs of maps (`rules.map_graph`). Of each
tapped layer the neck keeps what its first residual unit made, a sum that only nearby tokens reach,
and of each fusion layer the projected map before it is resized. The head keeps its map ahead of
the last resizing, and the result; the maps of full size in between are kept nowhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import UnsupportedError
from eventful.rules.local import HeadMemory, StepHead, plain_parts
from eventful.rules.map_graph import Map, MapUpdate, kept_bytes
from eventful.rules.map_layers import Convolution, Lift, Pointwise, ResidualUnit, Resize, Size
from eventful.surgery.adapter import Foreign, is_class

_MODELS = "transformers.models"
_ORDER = torch.contiguous_format
_PLAIN = (
    nn.BatchNorm2d,
    nn.Conv2d,
    nn.ConvTranspose2d,
    nn.Identity,
    nn.ModuleList,
    nn.ReLU,
    nn.Sequential,
    nn.Sigmoid,
    nn.Upsample,
)


def library_heads(model: nn.Module) -> Iterator[tuple[str, StepHead]]:
    """Heads of a model of transformers that can keep their maps, by path below it.

    Their weights are not looked at; a head may still have to run its original in a step.
    """
    found: dict[str, StepHead] = {}
    if is_class(
        model,
        f"{_MODELS}.depth_anything.modeling_depth_anything",
        "DepthAnythingForDepthEstimation",
    ):
        neck = FusionNeck(model.neck)
        found = {"neck": neck, "head": DepthAnythingHead(model.head, neck)}
    elif is_class(
        model, f"{_MODELS}.dpt.modeling_dpt", "DPTForDepthEstimation"
    ) and _ignores_class_token(model):
        neck = FusionNeck(model.neck, doubles=True)
        found = {"neck": neck, "head": DPTDepthHead(model.head, neck)}
    if found and all(_own_forward(part) for part in (model, *map(model.get_submodule, found))):
        yield from found.items()


def _ignores_class_token(model: Foreign) -> bool:
    """Whether a DPT head leaves the class token out, which changes in nearly every frame.

    With another readout it enters every token, so that every pixel changes with it.
    """
    stage = model.neck.reassemble_stage
    config = model.config
    return (
        stage is not None
        and config.readout_type == "ignore"
        and not config.is_hybrid
        and not config.neck_ignore_stages
    )


def _own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is the one that transformers gives its class."""
    replaced = vars(module).get("forward")
    # This package's own forward has the module as an attribute and calls the class's.
    if replaced is not None and getattr(replaced, "module", None) is not module:
        return False
    return type(module).forward.__module__.startswith(f"{_MODELS}.")


def _runs_plain(head: nn.Module) -> bool:
    """Whether its parts are the known ones, and nobody looks inside it or at what it returns."""
    if head._forward_hooks or head._forward_pre_hooks:
        return False
    own = {type(part) for part in head.modules() if type(part).__module__.startswith(f"{_MODELS}.")}
    forwards = [kind.forward.__module__ for kind in own]
    unchanged = all(module.startswith(f"{_MODELS}.") for module in forwards)
    return unchanged and plain_parts(head, (*_PLAIN, *own))


@dataclass(frozen=True, eq=False)
class NeckMaps:
    """The maps of a neck over a grid of tokens.

    Attributes:
        given: the tokens of each tapped layer.
        kept: in the order in which they are brought up to date.
        outputs: what the neck returns.
    """

    given: list[Map]
    kept: list[Map]
    outputs: list[Map]


class FusionNeck:
    """The neck of Depth Anything and DPT: tokens to maps, fused from coarse to fine.

    Args:
        doubles: each fused map is twice as large; otherwise as large as the next one.
    """

    def __init__(self, neck: Foreign, *, doubles: bool = False) -> None:
        self.neck, self.doubles = neck, doubles

    def step_forward(
        self, memory: HeadMemory, features: Sequence[Tensor], *size: int | None
    ) -> UpdatedFusion | None:
        """The neck's forward in a step of a stream: only what a changed token reaches."""
        first = features[0]
        grid = _grid(size, first)
        fits = grid is not None and all(
            one.dim() == 3 and one.shape[:2] == (len(first), grid[0] * grid[1] + 1)
            for one in features
        )
        if grid is None or not fits or len(features) != len(self.neck.convs):
            return None
        if not (memory.on_host(first) and memory.takes(len(first), grid, first)):
            return None
        maps = memory.constant(("maps", grid), lambda: self.maps_or_none(grid))
        if maps is None or not _runs_plain(self.neck):
            return None
        given, changed = {}, {}
        for number, (one, tokens) in enumerate(zip(maps.given, features, strict=True)):
            name = f"reference{number}"
            changed[one] = memory.compare(tokens[:, 1:], name).unflatten(1, grid)
            given[one] = memory.maps(name).unflatten(1, grid)
        update = MapUpdate(memory, given, changed)
        for one in maps.kept:
            update.bring(one)
        return UpdatedFusion(memory.name, maps, update)

    def step_bytes(self, grid: Size, dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        maps = self.maps_or_none(grid)
        if maps is None or dtype != torch.float32:
            return 0
        tokens = sum(one.channels for one in maps.given) * grid[0] * grid[1] * dtype.itemsize
        return tokens + kept_bytes(maps.kept, dtype.itemsize) + 8

    def maps_or_none(self, grid: Size) -> NeckMaps | None:
        """The maps; None where a layer is not known, or not in single precision."""
        if not _single_precision(self.neck):
            return None
        try:
            return self._maps(grid)
        except UnsupportedError:
            return None

    def _maps(self, grid: Size) -> NeckMaps:
        neck = self.neck
        given, levels = [], []
        for layer, conv in zip(neck.reassemble_stage.layers, neck.convs, strict=True):
            given.append(Map(grid, layer.projection.in_channels))
            resized = _resized(given[-1].then(Convolution(layer.projection)), layer.resize)
            levels.append(resized.then(Convolution(conv)))
        kept: list[Map] = []
        outputs: list[Map] = []
        units = zip(reversed(levels), neck.fusion_stage.layers, strict=True)
        for number, (level, unit) in enumerate(units):
            one = level
            if outputs:
                one = _to_size(level, outputs[-1].size, align_corners=False)
                side = one.then(_residual(unit.residual_layer1), kept=f"side{number}")
                kept.append(side)
                one = outputs[-1].plus(side)
            one = one.then(_residual(unit.residual_layer2))
            # A projection of each pixel gives the same before it is resized, of a smaller map.
            one = one.then(Convolution(unit.projection), kept=f"fused{number}")
            kept.append(one)
            last = self.doubles or number + 1 == len(levels)
            after = _doubled(one.size) if last else levels[-2 - number].size
            corners = getattr(unit, "align_corners", True)
            outputs.append(_to_size(one, after, align_corners=corners))
        return NeckMaps(given, kept, outputs)


class UpdatedFusion(Sequence[Tensor]):
    """What a neck returns in a step: a head that keeps its maps continues from the kept ones.

    Any other caller gets each map (B, C, h, w), made when it is taken out.

    Attributes:
        name: of the neck in the model.
    """

    def __init__(self, name: str, maps: NeckMaps, update: MapUpdate) -> None:
        self.name, self.maps, self.update = name, maps, update

    def __len__(self) -> int:
        return len(self.maps.outputs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        return self.update.whole(self.maps.outputs[index])


class DenseHead(ABC):
    """A head on one map of a neck. Subclasses describe it.

    Args:
        index: which of the maps.

    Attributes:
        squeezes: the result has one channel, and no axis for it.
    """

    squeezes = False

    def __init__(self, head: Foreign, neck: FusionNeck, index: int) -> None:
        self.head, self.neck, self.index = head, neck, index

    @abstractmethod
    def describe(self, x: Map, grid: Size) -> list[Map]:
        """The maps it keeps, the last one is the result.

        Args:
            x: the map of the neck.
            grid: (h, w) of the tokens.
        """

    def step_forward(self, memory: HeadMemory, fused: Any, *size: int) -> Tensor | None:
        """The head's forward in a step of a stream: only what a changed token reaches."""
        if not isinstance(fused, UpdatedFusion) or not _runs_plain(self.head):
            return None
        source = fused.maps.outputs[self.index]
        kept = memory.constant(("maps", source), lambda: self._kept(fused.maps))
        if not kept:
            return None
        base = source if source.kept is not None else source.sources[0]
        changed = memory.follow(fused.name, fused.update.changed(base))
        update = MapUpdate(memory, {base: fused.update.values(base)}, {base: changed})
        for one in kept:
            made = update.bring(one)
        made = made.permute(0, 3, 1, 2)
        return (made.squeeze(1) if self.squeezes else made).clone(memory_format=_ORDER)

    def step_bytes(self, grid: Size, dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        neck = self.neck.maps_or_none(grid)
        kept = None if neck is None else self._kept(neck)
        if not kept or dtype != torch.float32:
            return 0
        return kept_bytes(kept, dtype.itemsize) + 8

    def _kept(self, neck: NeckMaps) -> list[Map] | None:
        """The maps it keeps; None where a layer is not known, or not in single precision."""
        if not _single_precision(self.head):
            return None
        try:
            return self.describe(neck.outputs[self.index], neck.given[0].size)
        except UnsupportedError:
            return None


class DepthAnythingHead(DenseHead):
    """The head of Depth Anything: a convolution, resizing to the frame, two more."""

    squeezes = True

    def __init__(self, head: Foreign, neck: FusionNeck) -> None:
        super().__init__(head, neck, head.head_in_index)

    def describe(self, x: Map, grid: Size) -> list[Map]:
        """See `DenseHead`."""
        head = self.head
        narrow = x.then(Convolution(head.conv1), kept="narrow")
        frame = (int(grid[0] * head.patch_size), int(grid[1] * head.patch_size))
        x = _to_size(narrow, frame, align_corners=True)
        x = x.then(Convolution(head.conv2)).then(Pointwise(F.relu)).then(Convolution(head.conv3))
        return [narrow, x.then(Pointwise(self._depth), kept="out")]

    def _depth(self, values: Tensor) -> Tensor:
        scaled: Tensor = self.head.activation2(values) * self.head.max_depth
        return scaled


class DPTDepthHead(DenseHead):
    """The head of DPT for depth: layers one after another."""

    squeezes = True

    def __init__(self, head: Foreign, neck: FusionNeck) -> None:
        super().__init__(head, neck, head.config.head_in_index)

    def describe(self, x: Map, grid: Size) -> list[Map]:
        """See `DenseHead`."""
        if self.head.projection is not None:
            x = x.then(Convolution(self.head.projection)).then(Pointwise(F.relu))
        first, resize, *rest = self.head.head
        narrow = x.then(Convolution(first), kept="narrow")
        x = _to_size(narrow, _doubled(narrow.size), align_corners=True)
        if (resize.mode, resize.scale_factor, resize.align_corners) != ("bilinear", 2, True):
            raise UnsupportedError(f"{resize} does not double its map by its corners.")
        for layer in rest[:-1]:
            known = isinstance(layer, nn.Conv2d)
            x = x.then(Convolution(layer) if known else Pointwise(layer))
        return [narrow, x.then(Pointwise(rest[-1]), kept="out")]


def _grid(size: Sequence[int | None], tokens: Tensor) -> Size | None:
    """The grid that a neck is told; without it that of a square of tokens (B, 1 + N, D)."""
    if len(size) == 2 and size[0] is not None and size[1] is not None:
        return int(size[0]), int(size[1])
    side = int((tokens.shape[1] - 1) ** 0.5) if tokens.dim() == 3 else 0
    return (side, side) if not any(size) and side else None


def _single_precision(head: nn.Module) -> bool:
    return all(weight.dtype == torch.float32 for weight in head.parameters())


def _resized(x: Map, resize: nn.Module) -> Map:
    """What follows the projection of a tapped layer."""
    if isinstance(resize, nn.Identity):
        return x
    if isinstance(resize, nn.ConvTranspose2d):
        return x.then(Lift(resize))
    if isinstance(resize, nn.Conv2d):
        return x.then(Convolution(resize))
    raise UnsupportedError(f"{type(resize).__name__} is no known way to resize a map.")


def _residual(unit: Foreign) -> ResidualUnit:
    """A pre-activation residual unit, with batch norms in some models of DPT."""
    norms = [getattr(unit, f"batch_norm{i}", None) for i in (1, 2)]
    convs = (unit.convolution1, unit.convolution2)
    return ResidualUnit(*map(Convolution, convs, norms))


def _doubled(size: Size) -> Size:
    return 2 * size[0], 2 * size[1]


def _to_size(x: Map, size: Size, *, align_corners: bool) -> Map:
    if x.size == size:
        return x
    return x.then(Resize(x.size, size, align_corners=align_corners))
