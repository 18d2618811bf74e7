"""Stepping a model over a video under one variant, and what each step cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from eventful.config import Config
from eventful.cost.counting import count_backbone
from eventful.errors import ConfigError
from eventful.models.blocks import at_size, pooled
from eventful.paper.evaluate.variants import DENSE, SKIP, Variant, schedule
from eventful.rules.record import StepRecord
from eventful.stream import Stream
from eventful.surgery.conversion import block_shapes, convert


class Contender(ABC):
    """A model that is called with one step of a video after the other."""

    @property
    @abstractmethod
    def macs(self) -> int:
        """Operations of the last call."""

    @property
    def record(self) -> StepRecord | None:
        """Of the last call, if a stream made it. On a GPU, reading it waits for the step."""
        return None

    def reset(self) -> None:  # noqa: B027 - most remember nothing
        """Another video begins."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Step; takes and returns what the model does."""


class Dense(Contender):
    """The model as it is, whole on every step."""

    def __init__(self, model: Callable[..., Any], macs: int) -> None:
        self._model, self._macs = model, macs

    @property
    def macs(self) -> int:
        """See `Contender`."""
        return self._macs

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        with torch.no_grad():
            return self._model(*args)


class Streamed(Contender):
    """The converted model in a stream.

    Args:
        maps: keep error maps and masks in the record.
    """

    def __init__(self, model: nn.Module, config: Config, *, maps: bool = False) -> None:
        self._stream = Stream(convert(model, config), maps=maps)

    @property
    def macs(self) -> int:
        """See `Contender`."""
        return 0 if self.record is None else self.record.macs

    @property
    def record(self) -> StepRecord | None:
        """See `Contender`."""
        return self._stream.last

    def reset(self) -> None:
        """See `Contender`."""
        self._stream.reset()

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        return self._stream(*args)


class Skipping(Contender):
    """Another contender on a share of the steps; between them its last output stands."""

    def __init__(self, inner: Contender, share: float) -> None:
        self._inner, self._share = inner, share
        self._due: Iterator[bool] = schedule(share)
        self._held: Any = None
        self._ran = False

    @property
    def macs(self) -> int:
        """See `Contender`."""
        return self._inner.macs if self._ran else 0

    def reset(self) -> None:
        """See `Contender`."""
        self._inner.reset()
        self._due, self._held, self._ran = schedule(self._share), None, False

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        self._ran = next(self._due)
        if self._ran:
            self._held = self._inner(*args)
        return self._held


def contender(model: nn.Module, variant: Variant, size: int, *, maps: bool = False) -> Contender:
    """The model under a variant.

    Args:
        size: side of its frames in pixels.
        maps: keep error maps and masks in the records.
    """
    config, sized = variant.config(), (size, size)
    if variant.preset == SKIP:
        if variant.share is None:
            raise ConfigError("Skipping needs the share of the frames to compute, or a variant.")
        return Skipping(Dense(at_size(model, sized), dense_macs(model, size)), variant.share)
    if config is None:
        return Dense(at_size(model, sized), dense_macs(model, size))
    if variant.preset == DENSE:
        dense = pooled(at_size(model, sized), config.pool)
        return Dense(dense, dense_macs(model, size, config.pool))
    return Streamed(model, config, maps=maps)


def dense_macs(model: nn.Module, size: int, pool: int = 1) -> int:
    """Operations of one step of the model as it is, or with its keys pooled."""
    return count_backbone(block_shapes(model, size, Config.tokenwise(pool=pool))).total
