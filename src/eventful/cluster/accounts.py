"""What is known of each stream's frames: counted once, or missed and named. No files, no Ray.

Frames of a stream are numbered by its reader from 0 up. A worker that holds the lease of a stream
hands in entries. An entry is accepted if its epoch is that of the lease and its frames are behind
all that were accounted for. Numbers that were left out on the way become missed ranges, with the
reason:

* `dropped`: a newer frame replaced it before a worker took it;
* `lost`: a worker took it, and no result came of it;
* `disk full`: there was a result, and no room to keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

DROPPED, LOST, DISK_FULL = "dropped", "lost", "disk full"
REASONS = (DROPPED, LOST, DISK_FULL)

# again: the entry leaves out frames of a stream of which every frame is wanted.
# wait: there is no room; hand it in later.
Verdict = Literal["counted", "repeated", "fenced", "dropped", "wait", "again"]
State = Literal["running", "ended", "removed", "failed"]


@dataclass(frozen=True)
class Part:
    """One frame that a result was computed from.

    Attributes:
        behind: the first frame that nobody had taken when this one was; those from `behind` up to
            `number` were replaced by it.
        earlier: the same of some frames that were taken before, whatever became of them.
    """

    behind: int
    number: int
    earlier: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Entry:
    """One result.

    Attributes:
        parts: the frames of the step: one, or several for a model of clips.
        row: `seconds` and the prediction.
    """

    stream: str
    epoch: int
    parts: tuple[Part, ...]
    row: dict[str, Any]


@dataclass(frozen=True)
class Missed:
    """Frames without a result, both ends included."""

    first: int
    last: int
    reason: str

    def __len__(self) -> int:
        return self.last - self.first + 1

    def to_dict(self) -> dict[str, Any]:
        """As results have it."""
        return {"first": self.first, "last": self.last, "reason": self.reason}


@dataclass(frozen=True)
class Lease:
    """The right of one worker to count frames of one stream.

    Attributes:
        after: number of the last frame that is accounted for.
        every: every frame is wanted, not only the latest.
    """

    stream: str
    epoch: int
    worker: str
    reader: str
    after: int
    every: bool


@dataclass
class Account:
    """What is known of one stream.

    Attributes:
        shown: the source without credentials.
        worker: who holds the lease; empty for nobody.
        position: the last frame that is accounted for.
        counted: frames with a result; `missed` those without, by reason.
        repeated: entries that were handed in twice; `fenced` those of an old epoch.
        held: frames for whose results there was no room, not yet in the results.
        faults: workers that died of it since its last result; `message` says of what.
    """

    name: str
    shown: str = ""
    every: bool = False
    epoch: int = 0
    worker: str = ""
    reader: str = ""
    position: int = -1
    counted: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    repeated: int = 0
    fenced: int = 0
    state: State = "running"
    message: str = ""
    held: Missed | None = None
    faults: int = 0

    @property
    def over(self) -> bool:
        """Whether no entry is accepted any more."""
        return self.state != "running"

    def lease(self) -> Lease:
        """The lease in force."""
        return Lease(self.name, self.epoch, self.worker, self.reader, self.position, self.every)

    def judge(self, entry: Entry, *, room: bool) -> Verdict:
        """What to do with an entry; nothing changes but the counts of refusals.

        Args:
            room: whether its row can be kept.
        """
        if self.over or entry.epoch != self.epoch:
            self.fenced += 1
            return "fenced"
        first = entry.parts[0].number
        if first <= self.position:
            self.repeated += 1
            return "repeated"
        if self.every and first != self.position + 1:
            return "again"
        if not room:
            return "wait" if self.every else "dropped"
        return "counted"

    def count(self, entry: Entry) -> list[Missed]:
        """Count the frames of an entry that was judged `counted`; what was missed before it."""
        missed = self._release()
        if self.faults:
            self.faults, self.message = 0, ""
        for part in entry.parts:
            missed += self._skip(part)
            self.position = part.number
            self.counted += 1
        self._add(missed)
        return missed

    def hold(self, entry: Entry) -> None:
        """Pass over the frames of an entry for which there is no room."""
        first = self.held.first if self.held is not None else self.position + 1
        self.position = entry.parts[-1].number
        self.held = Missed(first, self.position, DISK_FULL)

    def name_held(self) -> list[Missed]:
        """Frames for whose results there was no room, if a row without a result names them."""
        missed = self._release()
        self._add(missed)
        return missed

    def described(self) -> dict[str, Any]:
        """As values for JSON, with the frames in `held` among those missed."""
        values = asdict(self)
        if self.held is not None:
            values["missed"][DISK_FULL] += len(self.held)
        return {**values, "held": None}

    def end(self, last: int, state: State, message: str = "") -> list[Missed]:
        """No more entries: what was missed up to frame number `last`."""
        missed = self._release()
        if last > self.position:
            missed.append(Missed(self.position + 1, last, LOST))
            self.position = last
        self._add(missed)
        self.state, self.message, self.worker = state, message, ""
        return missed

    def _skip(self, part: Part) -> list[Missed]:
        """The ranges between the position and a frame."""
        found: list[Missed] = []
        position = self.position
        for behind, number in (*part.earlier, (part.behind, part.number)):
            if number <= position:
                continue
            middle = min(max(behind, position + 1), number)
            _extend(found, Missed(position + 1, middle - 1, LOST))
            _extend(found, Missed(middle, number - 1, DROPPED))
            if number < part.number:
                _extend(found, Missed(number, number, LOST))  # taken, and never handed in
            position = number
        return found

    def _release(self) -> list[Missed]:
        held, self.held = self.held, None
        return [] if held is None else [held]

    def _add(self, missed: Iterable[Missed]) -> None:
        for each in missed:
            self.missed[each.reason] += len(each)


def _extend(found: list[Missed], missed: Missed) -> None:
    """Add a range that may be empty, or that goes on where the last one ends."""
    if not len(missed):
        return
    if found and found[-1].reason == missed.reason and found[-1].last + 1 == missed.first:
        missed = Missed(found.pop().first, missed.last, missed.reason)
    found.append(missed)
