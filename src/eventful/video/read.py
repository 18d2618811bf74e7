"""`eventful.read`: frames of a video, ready for a model, decoded ahead in a thread."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from eventful.errors import ConfigError, StreamClosedError
from eventful.video.address import LIST_SUFFIX, Source, find_source, read_list
from eventful.video.ahead import Ahead
from eventful.video.decoders import Decoder, open_decoder
from eventful.video.fitting import Fit, Fitting, frame_size
from eventful.video.frame import Frame
from eventful.video.lasting import LastingDecoder
from eventful.video.normalization import choose_normalization, input_size

_log = logging.getLogger("eventful.read")


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read; see `read`."""

    fitting: Fitting
    motion: bool
    live: bool | None
    timeout: float
    ahead: int

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout!r}: give seconds above 0.")
        if not isinstance(self.ahead, int) or self.ahead < 1:
            raise ConfigError(f"ahead={self.ahead!r}: hold at least 1 frame.")


def read(
    source: str | Path,
    size: int | tuple[int, int] | None = None,
    *,
    fit: Fit = "pad",
    multiple_of: int = 1,
    normalize: Any = None,
    model: Any = None,
    motion: bool = False,
    live: bool | None = None,
    timeout: float = 10.0,
    ahead: int = 4,
) -> VideoReader | ReaderGroup:
    """Read a video, as frames that a model takes.

    Args:
        source: a video file, a folder of images, a pattern such as `"frames/*.jpg"`, `"camera:0"`,
            an RTSP or HTTP(S) address, or a `.streams` file, which lists sources.
        size: height and width of frames; one number for a square; None for the model's input size
            if `model` is given, else the video's own.
        fit: "pad" keeps the aspect ratio and pads with zeros, "crop" keeps it and cuts, "stretch"
            does not keep it.
        multiple_of: height and width are rounded to multiples of this, such as the patch size.
        normalize: None for the model's values if `model` is given, else ImageNet's; "none" for
            pixels from 0 to 1; (mean, std); a model of timm, or an image processor of transformers.
        model: the model, or image processor, that says `size` and `normalize` where they are None.
        motion: whether to fill `Frame.motion` from the motion vectors of the file. A hint: FFmpeg
            does not say which earlier frame a vector refers to.
        live: whether the latest frame replaces older ones that were not taken. None: cameras,
            RTSP and endless HTTP are live. True for a file: it is read at its own pace.
        timeout: seconds to wait for the network.
        ahead: frames decoded ahead and held in memory.

    Returns:
        A reader to iterate over; of a `.streams` file, a group of them.

    Raises:
        ConfigError: An argument is not valid, or the kind of source is not supported.
        MissingFileError: There is no such file, or no images.
        DamagedMediaError: The file does not decode.
        PictureSizeError: Its pictures have more pixels than EVENTFUL_MAX_PIXELS, 89 million if it
            is not set.
        SourceError: A camera or address does not answer.
        MissingDependencyError: No decoder is installed.
    """
    chosen = frame_size(size)
    if chosen is None and model is not None:
        chosen = input_size(model)
    normalization = choose_normalization(normalize, model)
    fitting = Fitting(chosen, fit, multiple_of, normalization)
    options = ReadOptions(fitting, motion, live, timeout, ahead)
    if str(source).endswith(LIST_SUFFIX) and not Path(source).is_dir():
        return ReaderGroup(read_list(Path(source)), options)
    return VideoReader(find_source(source), options)


class VideoReader:
    """Frames of one source, decoded ahead in a thread. Made by `eventful.read`.

    Each iteration over a file starts at its first frame and ends one that is under way. A live
    source can be iterated once.
    """

    def __init__(self, source: Source, options: ReadOptions) -> None:
        self._source, self._options = source, options
        self._ahead: Ahead | None = None
        self._closed = False
        self._decoder = _opened(self._source, self._options)
        self._fresh = True  # the open decoder gave no frame so far
        self._release = weakref.finalize(self, self._decoder.close)

    @property
    def source(self) -> str:
        """The file or address, without credentials."""
        return self._source.shown

    @property
    def rate(self) -> float:
        """Frames per second; 25 where the source does not say, as for images."""
        return self._decoder.rate

    @property
    def live(self) -> bool:
        """Whether a new frame replaces one that was not taken."""
        return self._decoder.live if self._options.live is None else self._options.live

    @property
    def frames_read(self) -> int:
        """Frames delivered in this iteration."""
        return 0 if self._ahead is None else self._ahead.taken

    @property
    def dropped(self) -> int:
        """Frames of a live source that were replaced by newer ones before they were taken."""
        return 0 if self._ahead is None else self._ahead.dropped

    @property
    def damaged(self) -> int:
        """Frames that did not decode and were skipped."""
        return self._decoder.damaged

    @property
    def lost(self) -> int:
        """How often a live source was lost; see `lasting`."""
        return self._decoder.lost if isinstance(self._decoder, LastingDecoder) else 0

    @property
    def ready(self) -> bool:
        """Whether the next frame of this iteration, its end or an error is there, without a wait.

        False before the iteration has begun.
        """
        return self._ahead is not None and self._ahead.ready

    def __len__(self) -> int:
        """Frames as the file states, damaged ones included."""
        if self._decoder.length is None or self.live:
            raise TypeError(f"{self.source}: the number of frames is not known.")
        return self._decoder.length

    def __bool__(self) -> bool:
        """A reader is true, whether its length is known or not."""
        return True

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.frames_read} frames read"
        return f"<VideoReader {self.source}, {self.rate:g} frames/s, {state}>"

    def __iter__(self) -> Iterator[Frame]:
        if self._closed:
            raise StreamClosedError(f"{self.source}: this reader is closed. Call eventful.read.")
        if not self._fresh:
            if self.live:
                raise ConfigError(
                    f"{self.source} is live and can be iterated once. Call eventful.read again."
                )
            self._stop()
            self._decoder = _opened(self._source, self._options)
        self._fresh = False
        ahead = self._ahead = Ahead(self._options.ahead, latest=self.live)
        if isinstance(self._decoder, LastingDecoder):
            self._decoder.wait = ahead.wait_until
        paced = self.live and not self._decoder.live  # a file, as if it came from a camera
        self._release.detach()
        self._release = weakref.finalize(self, ahead.stop)
        ahead.start(self._decoder, self._options.fitting, self.source, paced=paced)
        return self._frames(ahead)

    def lasting(self, seconds: float) -> VideoReader:
        """This reader, which opens its source again for so many seconds if it is live and lost.

        The waits in between grow. The first frame after that has `resumed` true: flush the stream.
        """
        if not seconds > 0:
            raise ConfigError(f"lasting({seconds!r}): give seconds above 0.")
        if self._decoder.live and self._fresh and not isinstance(self._decoder, LastingDecoder):
            opened = partial(_opened, self._source, self._options)  # without this reader
            self._decoder = LastingDecoder(self._decoder, self.source, opened, seconds)
        return self

    def close(self) -> None:
        """Stop decoding and close the source."""
        if self._closed:
            return
        self._closed = True
        self._stop()

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _frames(self, ahead: Ahead) -> Iterator[Frame]:
        try:
            yield from ahead  # not in a variable: what the caller let go of is freed
        finally:
            ahead.stop()

    def _stop(self) -> None:
        """Stop the thread, which closes the decoder, or close a decoder that has none."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead.join()
        else:
            self._decoder.close()


def _opened(source: Source, options: ReadOptions) -> Decoder:
    return open_decoder(source, timeout=options.timeout, motion=options.motion, live=options.live)


class ReaderGroup:
    """Readers of the sources in a `.streams` file, by name.

    Iterating yields a dict from name to frame, with the next frame of every source that has not
    ended; it ends when all have. If a source fails, the others go on; see `failed`.
    """

    def __init__(self, sources: Mapping[str, Source], options: ReadOptions) -> None:
        self.readers: dict[str, VideoReader] = {}
        self.failed: dict[str, Exception] = {}
        try:
            for name, source in sources.items():
                self.readers[name] = VideoReader(source, options)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of sources."""
        return len(self.readers)

    def __getitem__(self, name: str) -> VideoReader:
        return self.readers[name]

    def __repr__(self) -> str:
        return f"<ReaderGroup {', '.join(self.readers)}>"

    def __iter__(self) -> Iterator[dict[str, Frame]]:
        self.failed.clear()
        running = {name: iter(reader) for name, reader in self.readers.items()}
        while running:
            frames: dict[str, Frame] = {}
            for name in list(running):
                try:
                    frames[name] = next(running[name])
                except StopIteration:
                    del running[name]
                except Exception as error:
                    del running[name]
                    self.failed[name] = error
                    if len(self.failed) == len(self.readers):
                        raise
                    _log.warning("%s stopped: %s", name, error)
            if frames:
                yield frames

    def lasting(self, seconds: float) -> ReaderGroup:
        """This group, with readers that open lost sources again; see `VideoReader.lasting`."""
        for reader in self.readers.values():
            reader.lasting(seconds)
        return self

    def close(self) -> None:
        """Close every reader."""
        for reader in self.readers.values():
            reader.close()

    def __enter__(self) -> ReaderGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
