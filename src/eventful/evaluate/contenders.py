"""Stepping a model over a video under one variant, and what each step cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from eventful.config import Config
from eventful.conversion import block_shapes, convert
from eventful.counting import count_backbone
from eventful.errors import ConfigError
from eventful.evaluate.variants import DENSE, SKIP, Variant, schedule
from eventful.step import StepRecord
from eventful.stream import Stream


class Contender:
    """A model that is called with one step of a video after the other.

    Attributes:
        macs: operations of the last call.
        record: of the last call, if a stream made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.macs = 0
        self.record: StepRecord | None = None

    def reset(self) -> None:
        """Another video begins."""

    def __call__(self, *args: Any) -> Any:
        """Step; takes and returns what the model does."""
        raise NotImplementedError


class Dense(Contender):
    """The model as it is, whole on every step."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__(model)
        self._macs = dense_macs(model, size)

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        self.macs = self._macs
        with torch.no_grad():
            return self.model(*args)


class Streamed(Contender):
    """The converted model in a stream.

    Args:
        flush: recompute everything at every step, which leaves only the pooling of the rule.
        maps: keep error maps and masks in the record.
    """

    def __init__(
        self, model: nn.Module, config: Config, *, flush: bool = False, maps: bool = False
    ) -> None:
        super().__init__(model)
        self.stream = Stream(convert(model, config), maps=maps)
        self._flush = flush

    def reset(self) -> None:
        """See `Contender`."""
        self.stream.reset()

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        if self._flush:
            self.stream.reset()
        output = self.stream(*args)
        self.record = self.stream.last
        assert self.record is not None
        self.macs = self.record.macs
        return output


class Skipping(Contender):
    """Another contender on a share of the steps; between them its last output stands."""

    def __init__(self, inner: Contender, share: float) -> None:
        super().__init__(inner.model)
        self._inner, self._share = inner, share
        self._due: Iterator[bool] = schedule(share)
        self._held: Any = None

    def reset(self) -> None:
        """See `Contender`."""
        self._inner.reset()
        self._due, self._held = schedule(self._share), None

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        self.macs = 0
        if next(self._due):
            self._held = self._inner(*args)
            self.macs = self._inner.macs
        return self._held


def contender(model: nn.Module, variant: Variant, size: int, *, maps: bool = False) -> Contender:
    """The model under a variant.

    Args:
        size: side of its frames in pixels.
        maps: keep error maps and masks in the records.
    """
    config = variant.config()
    if variant.preset == SKIP:
        if variant.share is None:
            raise ConfigError("Skipping needs the share of the frames to compute, or a variant.")
        return Skipping(Dense(model, size), variant.share)
    if config is None:
        return Dense(model, size)
    return Streamed(model, config, flush=variant.preset == DENSE, maps=maps)


def dense_macs(model: nn.Module, size: int) -> int:
    """Operations of one step of the model as it is."""
    return count_backbone(block_shapes(model, size, Config.tokenwise())).total
