"""One source of a run: its frames through the model, into results, video and stills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from eventful.errors import SnapshotError
from eventful.pipeline.annotate import draw, updated_tokens, with_text
from eventful.pipeline.history import FrameRow, Still
from eventful.pipeline.labels import labelled
from eventful.pipeline.outputs import FAILED, INTERRUPTED, Outputs
from eventful.pipeline.sources import Footage, SourceName, Taken, open_source
from eventful.pipeline.stepping import Stepped, Stepper
from eventful.pipeline.subject import Prepared
from eventful.pipeline.tracking import Tracks
from eventful.video.sink import VideoSink

_CRF, _SPEED = 23, "veryfast"  # of the video: drawing should not take longer than the model


class SourceRun:
    """Steps one source. It is opened by the first step and closed by `end`."""

    def __init__(self, out: Outputs, source: SourceName) -> None:
        self._out, self._source = out, source
        self._about = out.about[source.name]
        self._footage: Footage | None = None
        self._frames: Iterator[Taken] = iter(())
        self._stepper: Stepper | None = None
        self._tracks: Tracks | None = None
        self._sink: VideoSink | None = None
        self._size: tuple[int, int] | None = None  # of the video
        self._picture: tuple[int, int] | None = None  # height and width of the last frame
        self._lost = False  # the source was lost since the last frame that was used
        self._waiting: list[Taken] = []  # frames of a step that is not whole yet
        self._after = out.history.last.get(source.name, -1)
        self._live, self._seen = False, 0
        self._shift = 0  # of frame numbers of a live source that is resumed
        self._done = 0  # frames used, those before included

    @property
    def waits(self) -> bool:
        """Whether a step would have to wait for a frame."""
        return self._footage is not None and not self._footage.ready

    def step(self) -> bool:
        """Take one frame, and if it completes a step, run the model; False at the end."""
        if self._footage is None and not self._open():
            return False
        taken = self._next()
        if taken is None:
            return False
        self._lost |= taken.resumed  # even if this frame is left out
        if self._left_out(taken):
            return True
        stepper = self._stepper_for(taken)
        self._waiting.append(taken)
        if len(self._waiting) < stepper.ready.step_frames:
            return True
        pictures = [each.picture for each in self._waiting]
        prepared = stepper.ready.prepare(pictures)
        stepped = stepper.step(prepared)
        self._write(taken, prepared, stepped)
        self._done += len(pictures)
        self._waiting = []
        return True

    def end(self, status: str, message: str = "") -> None:
        """Close everything, and keep what a resumed run can go on from."""
        about = self._about
        about["status"], about["frames"] = status, self._done
        if self._waiting and self._stepper is not None and status != INTERRUPTED:
            about["unused"] = len(self._waiting)
            need = self._stepper.ready.step_frames
            self._out.note(
                self._source.name, f"has no result for its last frames: a step takes {need}."
            )
        for close in (self._close_source, self._close_video, self._save):
            try:
                close()
            except Exception as error:  # a full disk, for example
                message = message or f"{type(error).__name__}: {error}"
                about["status"] = FAILED
        if message:
            about["error"] = message
        self._out.observer.ended(self._source.name, about["status"], message)

    def _close_source(self) -> None:
        if self._footage is None:
            return
        # A live source that is resumed has lost frames before.
        before = self._about if self._shift else {}
        self._about["damaged"] = self._footage.damaged
        self._about["dropped"] = self._footage.dropped + before.get("dropped", 0)
        self._about["losses"] = self._footage.lost + before.get("losses", 0)
        self._footage.close()

    def _close_video(self) -> None:
        if self._sink is not None:
            self._sink.__exit__(None, None, None)

    def _save(self) -> None:
        """Keep what is remembered; a source that failed begins anew."""
        about, out = self._about, self._out
        if self._tracks is not None:
            about["tracks"] = self._tracks.count
        if self._stepper is not None:
            about.pop("saved", None)
            if about["status"] != FAILED and self._stepper.save(self._state("stream")):
                about["saved"] = out.history.last.get(self._source.name, -1)
                about["size"] = list(self._picture or ())
            out.scores.save(self._source.name, self._state("scores"))
            about["scored"] = out.history.last.get(self._source.name, -1)
            self._stepper.close()

    def _state(self, kind: str) -> Any:
        return self._out.folder.state(self._source.slug, kind)

    def _open(self) -> bool:
        """Open the source; False if a run before has done all of it."""
        out, limit = self._out, self._out.settings.frames
        count = out.history.counts.get(self._source.name, 0)
        self._done = count * out.subject.step_frames
        enough = limit is not None and self._done >= limit
        if count and (enough or self._about.get("whole")):
            return False
        self._footage = open_source(self._source, limit)
        if out.settings.labels is not None:
            self._footage = labelled(
                self._footage, self._source, out.settings.labels, out.subject.classes
            )
        self._live = self._footage.live
        if self._live:
            self._shift = self._after + 1
        self._frames = self._footage.frames(self._after)
        out.observer.began(self._source.name, self._total(), self._done)
        return True

    def _total(self) -> int | None:
        """Frames that the source gives in all."""
        assert self._footage is not None
        length, settings = self._footage.length, self._out.settings
        if length is None:
            return settings.frames
        every = -(-length // settings.every)
        return every if settings.frames is None else min(every, settings.frames)

    def _next(self) -> Taken | None:
        """The next frame; None at the end, or if there were enough."""
        settings, stop = self._out.settings, self._out.stop
        left = None if settings.frames is None else settings.frames - self._done
        if left is not None and len(self._waiting) >= left:
            return None
        with stop.waiting():
            taken = next(self._frames, None)
        if taken is None:
            self._about["whole"] = True
            return None
        return replace(taken, index=taken.index + self._shift)

    def _left_out(self, taken: Taken) -> bool:
        """Whether a frame is one of those between every so many-th."""
        # A live source leaves out numbers where frames were dropped.
        place, self._seen = self._seen, self._seen + 1
        return (place if self._live else taken.index) % self._out.settings.every != 0

    def _stepper_for(self, taken: Taken) -> Stepper:
        """The model for a frame, made at the first one; it forgets what is out of date."""
        size = (int(taken.picture.shape[1]), int(taken.picture.shape[2]))
        if self._stepper is None:
            self._stepper = self._begin(size)
        elif size != self._picture:
            self._resize(self._stepper, size)
        if self._lost:
            self._stepper.restart()
            self._follow_anew()
            self._waiting = []  # a step has frames from before the loss, or from after it
        self._picture, self._lost = size, False
        return self._stepper

    def _begin(self, size: tuple[int, int]) -> Stepper:
        """The model for pictures of a size, with what it remembers of the run before."""
        about = self._about
        stepper = self._made(size)
        if self._after >= 0 and about.get("saved") == self._after:
            self._restore(stepper, size)
        self._follow_anew()
        return stepper

    def _made(self, size: tuple[int, int]) -> Stepper:
        settings = self._out.settings
        maps = settings.video or settings.report
        return Stepper(self._out.subject.at(*size), settings, maps=maps)

    def _resize(self, stepper: Stepper, size: tuple[int, int]) -> None:
        """Go on with pictures of another size, which begin with a flush."""
        if self._out.subject.at(*size).size == stepper.ready.size:
            stepper.flush()
        else:  # the model sees frames in the shape of the pictures
            stepper.close()
            self._stepper = self._made(size)
        self._follow_anew()

    def _follow_anew(self) -> None:
        """New tracks, with numbers that were not given before."""
        settings = self._out.settings
        if settings.track is None:
            return
        assert self._footage is not None
        first = self._about.get("tracks", 0) if self._tracks is None else self._tracks.count
        rate = self._footage.rate / settings.every
        self._tracks = Tracks(settings.track, rate, settings.score, first)

    def _restore(self, stepper: Stepper, size: tuple[int, int]) -> None:
        """Remember what the run before did; what cannot be used is noted, and done without."""
        about = self._about
        try:
            if about.get("size", list(size)) != list(size):
                raise SnapshotError("The pictures have another size now.")
            about["resumed"] = stepper.restore(self._state("stream"))
        except SnapshotError as error:
            about["resumed"] = False
            self._out.note(
                self._source.name, f"goes on with a frame that is computed as a whole. {error}"
            )

    def _write(self, taken: Taken, prepared: Prepared, stepped: Stepped) -> None:
        """Everything that is kept of a step. The row comes before the result: see `rows.trim`."""
        out, name = self._out, self._source.name
        assert self._footage is not None
        assert self._stepper is not None
        both = (stepped.prediction, stepped.dense) if stepped.dense else (stepped.prediction,)
        out.scores.add(name, self._footage, taken, both)
        if self._tracks is not None:
            stepped = replace(stepped, prediction=self._tracks.follow(stepped.prediction))
        score = out.settings.score
        dense = None if stepped.dense is None else stepped.dense.above(score)
        stepped = replace(stepped, prediction=stepped.prediction.above(score), dense=dense)
        out.subject.kind = stepped.prediction.kind
        row = self._row(taken, stepped)
        out.rows.write(row)
        out.history.add(row)
        result = {"source": name, "frame": taken.index, "seconds": taken.seconds}
        result |= stepped.prediction.to_dict(out.subject.classes)
        if dense is not None:
            result["dense"] = dense.to_dict(out.subject.classes)
        out.results.write(result, stepped.prediction.arrays())
        self._about["memory"] = self._stepper.nbytes
        self._draw(row, prepared, stepped)
        out.observer.stepped(row, len(self._waiting))

    def _row(self, taken: Taken, stepped: Stepped) -> FrameRow:
        record = stepped.record
        return FrameRow(
            source=self._source.name,
            index=taken.index,
            seconds=taken.seconds,
            ms=stepped.ms,
            tokens=stepped.tokens,
            updated=stepped.updated,
            operations=stepped.operations,
            dense_operations=stepped.dense_operations,
            dense_ms=stepped.dense_ms,
            error=stepped.error,
            estimate=None if record is None else record.estimate,
            stale=record is not None and record.stale,
            flushed=record is None or all(record.flushed),
            found=stepped.prediction.found,
        )

    def _draw(self, row: FrameRow, prepared: Prepared, stepped: Stepped) -> None:
        """Add the frames of a step to the video, and offer the last one as a still."""
        out = self._out
        if not (out.settings.video or out.settings.report):
            return
        updated = updated_tokens(stepped.record, prepared.frame)
        classes, last = out.subject.classes, self._waiting[-1].picture
        out.observer.saw(row, last, stepped, updated)
        shown: Tensor | None = None
        if out.settings.video:
            for taken in self._waiting:
                shown = draw(taken.picture, stepped.prediction, classes, updated)
                self._film(with_text(shown, [_caption(row)]))

        def still() -> Still:
            drawn = shown  # but for features: what was updated is shown beside them
            if drawn is None or stepped.prediction.features is not None:
                drawn = draw(last, stepped.prediction, classes)
            dense = None if stepped.dense is None else draw(last, stepped.dense, classes)
            return Still(self._source.name, row.index, drawn, dense, updated)

        if out.settings.report:
            out.stills.offer(self._source.name, still)

    def _film(self, picture: Tensor) -> None:
        """Add a picture to the video, which is begun by the first."""
        if self._sink is None:
            assert self._footage is not None
            path = self._out.folder.video(self._source.slug)
            rate = self._footage.rate / self._out.settings.every
            sink = VideoSink(path, rate, _CRF, preset=_SPEED, fragmented=True)
            self._sink, self._size = sink.__enter__(), (picture.shape[1], picture.shape[2])
            self._about.setdefault("videos", []).append(path.name)
            self._out.save()  # the file is known even if the process is killed
        if tuple(picture.shape[1:]) != self._size:  # a source may change its size on the way
            assert self._size is not None
            picture = _inside(picture, self._size)
        self._sink.write(picture)


def _inside(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """A picture (3, H, W) scaled into another size, with bars where its shape differs."""
    scale = min(size[0] / picture.shape[1], size[1] / picture.shape[2])
    height, width = (
        max(1, min(edge, round(side * scale)))
        for side, edge in zip(picture.shape[1:], size, strict=True)
    )
    scaled = F.interpolate(picture[None], (height, width), mode="bilinear", antialias=True)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return F.pad(scaled, (left, size[1] - width - left, top, size[0] - height - top))


def _caption(row: FrameRow) -> str:
    """One line about a step."""
    share = f"{row.updated / row.tokens:.0%} of tokens" if row.tokens else "dense"
    parts = [f"frame {row.index}", share, f"{row.ms:.0f} ms"]
    if row.dense_ms is not None:
        parts.append(f"dense {row.dense_ms:.0f} ms")
    if row.error is not None:
        parts.append(f"error {row.error:.3f}")
    return " · ".join(parts)
