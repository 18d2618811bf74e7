"""What the sources of a run share: files, sums, and who wants to know how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventful.pipeline.folder import RunFolder
from eventful.pipeline.history import FrameRow
from eventful.pipeline.results import ResultWriter
from eventful.pipeline.rows import History, RowFile
from eventful.pipeline.scoring import Scores
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.stills import Stills
from eventful.pipeline.stopping import Stop
from eventful.pipeline.subject import Subject

if TYPE_CHECKING:
    from eventful.pipeline.stepping import Stepped

COMPLETE, INTERRUPTED, FAILED, RUNNING = "complete", "interrupted", "failed", "running"
WAITING = "not started"


class Observer:
    """Progress of a run; each method does nothing unless it is overridden."""

    def began(self, source: str, total: int | None, done: int) -> None:
        """A source was opened.

        Args:
            total: frames it will give, None where that is not known.
            done: those that a resumed run has done before.
        """

    def stepped(self, row: FrameRow, frames: int) -> None:
        """A step was done, with so many frames."""

    def saw(self, row: FrameRow, picture: Tensor, stepped: Stepped, updated: Tensor | None) -> None:
        """What a step saw and found, for those who draw it; without video and report not called.

        Args:
            picture: (3, H, W) bytes.
            updated: (h, w) which tokens were computed.
        """

    def noted(self, source: str, message: str) -> None:
        """Something that the user should know, which does not end the source."""

    def ended(self, source: str, status: str, message: str) -> None:
        """A source ended; the message says why where it failed."""


@dataclass
class Outputs:
    """What all sources of a run share.

    Attributes:
        about: what `run.json` says of each source, by name.
        save: writes `run.json` as it is now.
        versions: of libraries and machine.
    """

    subject: Subject
    settings: RunSettings
    folder: RunFolder
    rows: RowFile
    results: ResultWriter
    history: History
    scores: Scores
    observer: Observer
    stop: Stop
    versions: dict[str, str]
    stills: Stills = field(default_factory=Stills)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None

    def note(self, source: str, message: str) -> None:
        """Keep and tell something that does not end a source."""
        self.about[source].setdefault("notes", []).append(message)
        self.observer.noted(source, message)
