"""Every exception type of the library. Each message says what to do next."""

from __future__ import annotations

from typing import Any


class EventfulError(Exception):
    """Base of all errors raised by eventful."""


class ConfigError(EventfulError, ValueError):
    """A configuration, policy or argument that is not valid."""


class NoMatchError(EventfulError):
    """`convert` found no transformer block it can make eventful."""


class UnsupportedError(EventfulError):
    """A call or option that is not supported inside a stream."""


class Mismatch(UnsupportedError):
    """A block that cannot be made eventful; the message says why, of the block."""


class FrameError(EventfulError, ValueError):
    """A frame that does not fit the stream: another size, dtype, device or batch."""


class NonFiniteError(FrameError):
    """NaN or Inf in a frame, or computed from one.

    Nothing of a bad frame is kept. Where NaN arises inside the model on a GPU, the next frame
    recomputes everything.

    Attributes:
        rows: indices of the bad frames in the call, where known.
        streams: in a batch, names of the streams that were not stepped.
        good: in a batch, names of the streams that were stepped.
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
    """The model changed while a stream holds results computed before the change."""


class ConcurrentUseError(EventfulError):
    """One stream was stepped by two threads at the same time."""


class StreamClosedError(EventfulError):
    """A stream was used after `close`."""


class GradientError(EventfulError):
    """Gradients were requested through a stream."""


class TrainingModeError(EventfulError):
    """The model is in training mode, and a stream would keep one draw of dropout."""


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
    """A measured model does not give the dense model's result, so its times are not reported."""


class MissingDependencyError(EventfulError, ImportError):
    """An optional library is needed and not installed."""


class BackendError(EventfulError):
    """A forced backend does not exist or cannot serve a call."""


class DataError(EventfulError):
    """Data on disk that cannot be used as it is."""


class MissingFileError(DataError, FileNotFoundError):
    """A file or folder that a dataset needs does not exist."""


class MalformedDataError(DataError, ValueError):
    """A line, field or value of an annotation file that its format does not allow."""


class DamagedMediaError(DataError):
    """An image or video that exists and cannot be decoded."""


class PictureSizeError(DamagedMediaError, ValueError):
    """An image or video whose pictures have more pixels than the limit, or than fit in memory."""


class SourceError(DataError, OSError):
    """A camera or network address that cannot be opened, or that stopped sending."""


class RunError(EventfulError):
    """A folder of results that belongs to another run, or lacks results that are needed."""


class WorkerError(EventfulError):
    """A worker process ended unexpectedly."""


class ClusterError(EventfulError):
    """A cluster that cannot be reached or started, or a machine of it that does not fit."""


class ArtefactError(EventfulError):
    """A folder of exported graphs that is damaged, was changed, or does not fit what is asked."""
