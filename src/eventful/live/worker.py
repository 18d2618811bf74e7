"""The thread that runs the model over all sources of the page."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eventful.errors import ConfigError, EventfulError
from eventful.live.channels import Channel, Shown
from eventful.live.feed import Feed
from eventful.live.groups import CHOICES, DENSE, SHARE, Group, Result, needs_share
from eventful.live.memory import give_back
from eventful.pipeline.sources import Footage, SourceName
from eventful.pipeline.subject import Prepared, ReadySubject, Subject

_log = logging.getLogger("eventful.live")
DENSE_EVERY = 30.0  # seconds between two measurements of the whole model, for comparison
GIVE_BACK_EVERY = 20.0  # seconds between two times that free memory is given back
_IDLE = 0.5  # seconds after which the thread looks for changes though nobody called it
_PATIENCE = 2.0  # seconds to wait for the thread of a source at the end
_LAST_STEP = 60.0  # for the step under way: a program that ends inside of torch is aborted


@dataclass(frozen=True)
class Wanted:
    """What the page asks for.

    Attributes:
        share: of the tokens to update; None for the preset's own policy.
    """

    preset: str = "fast"
    share: float | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        if self.preset not in CHOICES:
            raise ConfigError(f"There is no preset {self.preset!r}: {', '.join(CHOICES)}.")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"A share of the tokens is above 0 and at most 1, not {self.share}.")

    @property
    def effective(self) -> float | None:
        """The share in force: a preset without a policy of its own has a usual one."""
        return SHARE if self.share is None and needs_share(self.preset) else self.share


class Worker:
    """Runs one model over sources that come and go. All methods may be called by any thread.

    Changes of the budget, the preset or the sources take effect at the next step; of several
    changes during one step the last one counts.

    Args:
        score: detections below it are left out.
        most: sources at one time.
        dense_every: seconds between measurements of the whole model; None for none.

    Attributes:
        on_result: called in the worker's thread when a source has a new result.
        notices: number and text of what the user should know, the last one.
    """

    def __init__(
        self,
        subject: Subject,
        wanted: Wanted | None = None,
        *,
        score: float = 0.5,
        most: int = 16,
        dense_every: float | None = DENSE_EVERY,
        open_footage: Callable[[SourceName], Footage] | None = None,
    ) -> None:
        self.subject, self.most = subject, most
        self.on_result: Callable[[], None] = lambda: None
        self.notice: tuple[int, str] = (0, "")
        self._score, self._dense_every, self._open = score, dense_every, open_footage
        self._wanted = wanted or Wanted()
        self._applied = self._proven = self._wanted
        self._channels: dict[str, Channel] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._ready: dict[tuple[int, int], ReadySubject] = {}
        self._measured: dict[tuple[int, int], float] = {}
        self._resets: set[str] = set()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._stopped = self._called = False
        self._thread = threading.Thread(target=self._run, name="eventful.live", daemon=True)

    def start(self) -> Worker:
        """Begin to work."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and close all sources."""
        with self._changed:
            self._stopped = True
            channels = list(self._channels.values())
            self._changed.notify_all()
        for channel in channels:
            channel.feed.close()
        for channel in channels:
            channel.feed.join(_PATIENCE)
        if self._thread.is_alive():
            self._thread.join(_LAST_STEP)

    @property
    def alive(self) -> bool:
        """Whether the thread works."""
        return self._thread.is_alive()

    @property
    def wanted(self) -> Wanted:
        """What was asked for last."""
        return self._wanted

    @property
    def channels(self) -> list[Channel]:
        """The sources, in the order they were added."""
        with self._changed:
            return list(self._channels.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the streams keep."""
        return sum(group.nbytes for group in list(self._groups.values()))

    def add(self, source: SourceName, *, loop: bool = False) -> Channel:
        """Add a source; it is opened in a thread of its own.

        Raises:
            ConfigError: There are as many as there may be.
        """
        with self._changed:
            if len(self._channels) >= self.most:
                raise ConfigError(
                    f"There are {self.most} sources, the most at one time. Remove one first."
                )
            number = f"s{next(self._numbers)}"
            feed = Feed(source, loop=loop, notify=self._call, open_footage=self._open)
            feed.pause(self._wanted.paused)
            channel = self._channels[number] = Channel(number, source.name, feed)
        feed.start()
        return channel

    def remove(self, number: str) -> None:
        """Remove a source; KeyError if there is none."""
        with self._changed:
            channel = self._channels.pop(number)
        channel.feed.close()
        self._call()

    def change(self, **values: Any) -> Wanted:
        """Ask for another `preset`, `share` or `paused`.

        Raises:
            ConfigError: A value is not valid; nothing changes.
        """
        with self._changed:
            wanted = self._wanted = replace(self._wanted, **values)
            for channel in self._channels.values():
                channel.feed.pause(wanted.paused)
        self._call()
        return wanted

    def reset(self, number: str | None = None) -> None:
        """Forget what was computed, of one source or all; KeyError if there is no such source."""
        with self._changed:
            chosen = list(self._channels) if number is None else [self._channels[number].id]
            self._resets.update(chosen)
        self._call()

    def _call(self) -> None:
        with self._changed:
            self._called = True
            self._changed.notify_all()

    # What follows runs in the worker's thread.

    def _run(self) -> None:
        given_back = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._called, _IDLE)
                self._called = False
                if self._stopped:
                    break
            try:
                self._turn()
            except Exception as error:  # a fault of ours: say so, and go on
                _log.exception("a turn of the page failed")
                self._say(f"{type(error).__name__}: {error}")
                time.sleep(_IDLE)
            if time.monotonic() - given_back > GIVE_BACK_EVERY:
                give_back()
                given_back = time.monotonic()
        for group in self._groups.values():
            group.close()

    def _turn(self) -> None:
        """Apply what has changed, and step every source that has a frame."""
        self._apply()
        if self._applied.paused:
            return
        due: dict[tuple[int, int], dict[str, Prepared]] = {}
        for channel in self.channels:
            if self._collect(channel):
                self._prepare(channel, due)
        for size, prepared in due.items():
            self._step(size, prepared)
        if due:
            self.on_result()

    def _apply(self) -> None:
        wanted = self._wanted
        if wanted.preset != self._applied.preset:
            self._drop_groups()
        elif wanted.share != self._applied.share:
            for group in self._groups.values():
                group.set_share(wanted.share)
        self._applied = wanted
        with self._changed:
            resets, self._resets = self._resets, set()
            channels = dict(self._channels)
        for size, group in list(self._groups.items()):
            for name in group.streams:
                if name not in channels:
                    group.leave(name)
                elif name in resets:
                    group.flush(name)
            if not group.streams:
                group.close()
                del self._groups[size]
        for name in resets & channels.keys():
            channels[name].forget()
        sizes = {channel.size for channel in channels.values()}
        self._ready = {size: ready for size, ready in self._ready.items() if size in sizes}

    def _drop_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._measured.clear()

    def _collect(self, channel: Channel) -> bool:
        """Take a waiting frame; whether a step is whole."""
        arrived = channel.feed.take()
        if arrived is None:
            return False
        size = (int(arrived.picture.shape[1]), int(arrived.picture.shape[2]))
        if arrived.resumed or (channel.size is not None and size != channel.size):
            channel.pending.clear()
            for group in self._groups.values():
                if channel.id in group.streams:
                    group.flush(channel.id)
        channel.size = size
        channel.pending.append(arrived)
        return len(channel.pending) >= self.subject.step_frames

    def _prepare(self, channel: Channel, due: dict[tuple[int, int], dict[str, Prepared]]) -> None:
        assert channel.size is not None
        try:
            if channel.size not in self._ready:
                self._ready[channel.size] = self.subject.at(*channel.size)
            ready = self._ready[channel.size]
            prepared = ready.prepare([frame.picture for frame in channel.pending])
        except Exception as error:
            self._fail(channel, error)
            return
        due.setdefault(ready.size, {})[channel.id] = prepared

    def _step(self, size: tuple[int, int], prepared: Mapping[str, Prepared]) -> None:
        """Step the sources of one size. Where that fails, find out which of them is at fault."""
        try:
            results = self._group(size, prepared).step(prepared)
        except Exception as error:
            if self._wanted_is_new():
                self._go_back(error)
            elif len(prepared) > 1:
                for name, row in prepared.items():
                    self._step(size, {name: row})
            else:
                [name] = prepared
                self._fail(self._channels.get(name), error)
            return
        self._proven = self._applied
        self._compare(size, prepared)
        for name, result in results.items():
            self._note(name, result, size)

    def _group(self, size: tuple[int, int], prepared: Mapping[str, Prepared]) -> Group:
        """The group of a size, with these sources in it and in no other."""
        if size not in self._groups:
            ready = next(ready for ready in self._ready.values() if ready.size == size)
            self._groups[size] = Group(ready, self._applied.preset, self._applied.share)
        group = self._groups[size]
        for name in prepared:
            for other in self._groups.values():
                if other is not group and name in other.streams:
                    other.leave(name)
            if name not in group.streams:
                group.join(name)
        return group

    def _compare(self, size: tuple[int, int], prepared: Mapping[str, Prepared]) -> None:
        """Time the whole model, now and then."""
        now = time.monotonic()
        if self._dense_every is None or self._applied.preset == DENSE:
            return
        if now - self._measured.get(size, float("-inf")) < self._dense_every:
            return
        self._measured[size] = now
        self._groups[size].measure_dense(list(prepared.values()))

    def _note(self, name: str, result: Result, size: tuple[int, int]) -> None:
        channel = self._channels.get(name)
        if channel is None:  # removed while it was stepped
            return
        last = channel.pending[-1]
        channel.pending = []
        channel.dense_ms = self._groups[size].dense_ms
        channel.add(result.numbers, last.moment)
        channel.shown = Shown(
            channel.steps,
            last.picture,
            result.prediction.above(self._score),
            result.updated,
            channel.scaled(result.error),
        )

    def _wanted_is_new(self) -> bool:
        """Whether no step has succeeded since the preset was changed."""
        return self._applied.preset != self._proven.preset

    def _go_back(self, error: Exception) -> None:
        """A preset that this model does not take: the one before is used again."""
        refused, self._applied = self._applied.preset, self._proven
        with self._changed:
            if self._wanted.preset == refused:
                self._wanted = self._proven
        self._drop_groups()
        for channel in self.channels:
            channel.pending = []
        self._say(f"{refused} cannot be used with {self.subject.name}: {_text(error)}")

    def _fail(self, channel: Channel | None, error: Exception) -> None:
        if channel is None:
            return
        channel.pending = []
        channel.feed.fail(_text(error))
        for group in self._groups.values():
            if channel.id in group.streams:
                group.leave(channel.id)

    def _say(self, text: str) -> None:
        self.notice = (self.notice[0] + 1, text)
        self.on_result()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, EventfulError) else f"{type(error).__name__}: {error}"
