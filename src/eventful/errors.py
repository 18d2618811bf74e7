"""Every exception the library raises on purpose. Each message says what to do next."""

from __future__ import annotations

from typing import Any


class EventfulError(Exception):
    """Base of all errors raised by eventful."""


class ConfigError(EventfulError, ValueError):
    """A configuration or policy that makes no sense."""


class NoMatchError(EventfulError):
    """`convert` found no transformer block it can make eventful."""


class UnsupportedError(EventfulError):
    """A request that has no meaning, or no implementation, inside a stream."""


class FrameError(EventfulError, ValueError):
    """A frame that does not fit the stream: other size, dtype, device or batch."""


class NonFiniteError(FrameError):
    """NaN or Inf in a frame, or arising from one.

    Nothing of a bad frame is remembered. Where NaN arises inside the model on a GPU, the next frame
    recomputes everything.

    Attributes:
        rows: which frames of the call, where that is known.
        streams: of a batch, the names of the streams that were left as they were.
        good: of a batch, the names of the streams that were stepped all the same.
        result: what the model returned for `good`, in that order; None if none was stepped.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rows: tuple[int, ...] = (),
        streams: tuple[str, ...] = (),
        good: tuple[str, ...] = (),
        result: Any = None,
    ) -> None:
        super().__init__(message)
        self.rows, self.streams, self.good, self.result = rows, streams, good, result


class WeightsChangedError(EventfulError):
    """The model's weights changed while a stream holds results of the old ones."""


class ConcurrentUseError(EventfulError):
    """One stream stepped from two threads at once."""


class StreamClosedError(EventfulError):
    """A stream used after `close`."""


class GradientError(EventfulError):
    """Gradients were asked for through a stream."""


class TrainingModeError(EventfulError):
    """The model is in training mode, where dropout would be remembered."""


class SnapshotError(EventfulError):
    """A snapshot that cannot be written, or does not belong to this model."""


class StreamNameError(EventfulError, KeyError):
    """A stream name that is unknown to, or already taken in, a batch."""

    def __str__(self) -> str:
        """KeyError would print the repr of the message."""
        return str(self.args[0]) if self.args else ""


class CheckpointError(EventfulError):
    """A file of weights that cannot be read, or whose keys do not fit the model."""


class ParityError(EventfulError):
    """A contender does not compute what the dense model does; its times would mean nothing."""


class MissingDependencyError(EventfulError, ImportError):
    """An optional library is needed and not installed."""


class BackendError(EventfulError):
    """A forced backend does not exist or cannot serve a call."""


class DataError(EventfulError):
    """Data on disk that cannot be used as it is."""


class MissingFileError(DataError, FileNotFoundError):
    """A file or folder that a dataset needs or names is not there."""


class MalformedDataError(DataError, ValueError):
    """A line, field or value of an annotation file that is not what the layout says."""


class DamagedMediaError(DataError):
    """An image or video that is there and cannot be decoded."""


class RunError(EventfulError):
    """A folder of results that belongs to another run, or lacks what is asked of it."""


class WorkerError(EventfulError):
    """A process that was working on part of the data came to an unexpected end."""
