"""Contenders: how to run a model on a video, dense, in a stream or skipping frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from eventful.errors import ConfigError
from eventful.rules.record import StepRecord
from eventful.stream import Stream, StreamBatch


class Contender(ABC):
    """A model that is called with one step of a video after the other."""

    @property
    @abstractmethod
    def macs(self) -> int:
        """Operations of the last call."""

    @property
    def record(self) -> StepRecord | None:
        """Record of a stream's last call, else None. On a GPU, reading it waits for the step."""
        return None

    def reset(self) -> None:  # noqa: B027 - most keep no state
        """Prepare for another video."""

    def flush(self) -> None:  # noqa: B027 - most keep no state
        """Make the next call recompute everything."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Run one step; takes and returns what the model does."""


class Dense(Contender):
    """The whole model on every step.

    Args:
        macs: operations of one call.
    """

    def __init__(self, model: Callable[..., Any], macs: int = 0) -> None:
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
    """A converted model in a stream, or in a batch of streams that are stepped together.

    Args:
        method: of the model, to call in place of its forward.
    """

    def __init__(self, stream: Stream | StreamBatch, method: str | None = None) -> None:
        self.stream, self._method = stream, method

    @property
    def macs(self) -> int:
        """See `Contender`."""
        return 0 if self.record is None else self.record.macs

    @property
    def record(self) -> StepRecord | None:
        """See `Contender`."""
        return self.stream.last

    def reset(self) -> None:
        """See `Contender`."""
        if isinstance(self.stream, Stream):
            self.stream.reset()
        else:
            self.flush()  # frames stay of one size, so memory and CUDA graphs can stay

    def flush(self) -> None:
        """See `Contender`."""
        if isinstance(self.stream, Stream):
            self.stream.flush()
        else:
            for name in self.stream.streams:
                self.stream.flush(name)

    def __call__(self, *args: Any) -> Any:
        """See `Contender`."""
        return self.stream(*args) if self._method is None else self.stream.call(self._method, *args)


class Skipping(Contender):
    """Another contender on a share of the steps; in between its last output is repeated."""

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


@dataclass
class Measured:
    """A contender, and what was measured of it step by step.

    Attributes:
        error: relative error of its output against the dense one.
    """

    run: Contender
    ms: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)


def schedule(share: float) -> Iterator[bool]:
    """Which frames a skipping model computes: the first, and then `share` of them, spread evenly.

    Of the first T frames it computes ⌈T·share⌉, so its cost is never below the share.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"Skipping computes a share of the frames in (0, 1], not {share!r}.")
    done, frame = 0, 0
    while True:
        frame += 1
        due = done < share * frame - 1e-9
        done += due
        yield due
