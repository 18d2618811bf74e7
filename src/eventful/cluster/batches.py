"""The streams of one worker: one batch for each size of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eventful.cluster.messages import in_words
from eventful.cluster.sources import ModelSpec
from eventful.errors import EventfulError, SnapshotError
from eventful.live.groups import Group, Result
from eventful.pipeline.subject import Prepared, ReadySubject, Subject, open_subject

Size = tuple[int, int]


@dataclass
class _Member:
    """A stream.

    Attributes:
        picture: height and width of its frames; `group` that of the frames of the model.
        snapshot: what it goes on from, until its first frame.
    """

    picture: Size | None = None
    group: Size | None = None
    snapshot: bytes | None = None


@dataclass
class Stepped:
    """What became of a step, by stream.

    Attributes:
        failed: why the frames of some streams cannot be used.
        faults: errors that are not of the frames: this process cannot go on.
    """

    results: dict[str, Result] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, other: Stepped) -> None:
        """Put another one to this."""
        self.results |= other.results
        self.failed |= other.failed
        self.faults |= other.faults


class Batches:
    """Steps streams of any sizes. A stream whose frames cannot be used does not stop the others.

    Attributes:
        flushed: streams that began with a whole frame; `resumed` those that had a snapshot.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.subject: Subject = open_subject(spec.model, weights=spec.weights, size=spec.size)
        self.subject.to(spec.device, spec.dtype)
        self._ready: dict[Size, ReadySubject] = {}
        self._groups: dict[Size, Group] = {}
        self._members: dict[str, _Member] = {}
        self.flushed = self.resumed = 0

    @property
    def step_frames(self) -> int:
        """Frames of one step."""
        return self.subject.step_frames

    @property
    def nbytes(self) -> int:
        """Bytes that the streams keep."""
        return sum(group.nbytes for group in self._groups.values())

    def join(self, name: str, snapshot: bytes | None = None) -> None:
        """Add a stream, or begin it anew."""
        self.leave(name)
        self._members[name] = _Member(snapshot=snapshot)

    def leave(self, name: str) -> None:
        """Forget a stream."""
        member = self._members.pop(name, None)
        if member is not None and member.group is not None:
            self._leave_group(name, member.group)

    def flush(self, name: str) -> None:
        """Compute everything at the next frame of a stream."""
        member = self._members[name]
        member.snapshot = None
        if member.group is not None:
            self._groups[member.group].flush(name)

    def snapshot(self, name: str, most: int) -> bytes | None:
        """What is remembered of a stream, if it is at most so many bytes."""
        member = self._members.get(name)
        if member is None or member.group is None:
            return None
        group = self._groups[member.group]
        if group.nbytes / len(group.streams) > most:  # before it is made
            return None
        try:
            made = group.snapshot(name)
        except EventfulError:
            return None
        return made if made is not None and len(made) <= most else None

    def step(self, pictures: Mapping[str, list[np.ndarray]]) -> Stepped:
        """Step some streams."""
        due: dict[Size, dict[str, Prepared]] = {}
        found = Stepped()
        for name, frames in pictures.items():
            try:
                size, prepared = self._prepare(name, frames)
            except Exception as error:  # of this stream's frames
                found.failed[name] = in_words(error)
            else:
                due.setdefault(size, {})[name] = prepared
        for size, together in due.items():
            own = Stepped()
            self._step(size, together, own)
            if len(together) > 1 and not own.results:
                # So many streams are not bad at the same time: something is wrong with all of this.
                own = Stepped(faults={**own.failed, **own.faults})
            found.add(own)
        return found

    def row(self, result: Result) -> dict[str, Any]:
        """A prediction as results have it."""
        return result.prediction.above(self.spec.score).to_dict(self.subject.classes)

    def _prepare(self, name: str, frames: list[np.ndarray]) -> tuple[Size, Prepared]:
        member = self._members[name]
        size = (int(frames[-1].shape[1]), int(frames[-1].shape[2]))
        if size not in self._ready:
            self._ready[size] = self.subject.at(*size)
        ready = self._ready[size]
        # Copied: what comes from another process cannot be written to.
        prepared = ready.prepare([torch.tensor(frame) for frame in frames])
        if member.picture != size:
            if member.group is not None:
                self._leave_group(name, member.group)
            self._enter(name, member, ready)
        member.picture = size
        return ready.size, prepared

    def _enter(self, name: str, member: _Member, ready: ReadySubject) -> None:
        """Join the group of a size, with the snapshot if it fits."""
        if ready.size not in self._groups:
            spec = self.spec
            self._groups[ready.size] = Group(ready, spec.preset, spec.share, maps=False)
        group, snapshot = self._groups[ready.size], member.snapshot
        member.group, member.snapshot = ready.size, None
        if snapshot is not None:
            try:
                group.join(name, snapshot)
                self.resumed += 1
                return
            except (SnapshotError, EventfulError):
                pass  # it is an optimisation alone: begin with a whole frame
        group.join(name)
        self.flushed += 1

    def _leave_group(self, name: str, size: Size) -> None:
        group = self._groups[size]
        group.leave(name)
        if not group.streams:
            group.close()
            del self._groups[size]

    def _step(self, size: Size, prepared: Mapping[str, Prepared], found: Stepped) -> None:
        """Step the streams of one size. If that fails, find out which of them is at fault."""
        try:
            found.results.update(self._groups[size].step(prepared))
        except Exception as error:
            if len(prepared) > 1:
                for name, row in prepared.items():
                    self._step(size, {name: row}, found)
                return
            # What is said of frames is of this stream. Anything else may be the fault of the
            # process: after an error of CUDA every call fails.
            table = found.failed if isinstance(error, EventfulError) else found.faults
            table[next(iter(prepared))] = in_words(error)
