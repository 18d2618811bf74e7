"""Whether the processes of a run are alive, from their answers and silences. No clocks, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from eventful.cluster.links import Link, LinkDead, LinkDown, LinkError, Reply

Life = Literal["starting", "up", "down", "hung"]
BUSY = ("starting", "first step")  # phases of a worker that may take long


@dataclass
class Watch:
    """Asks one process how it is, again and again.

    Attributes:
        answer: the last one; empty before the first.
        asked: moment at which the answer was asked for; `answered` at which it came.
        started: when the process says it was started; it changes if it was started again.
        again: how often that happened.
        dead: why the process is gone for good; empty if it is not.
    """

    name: str
    method: str
    deadline: float
    start_deadline: float
    answer: dict[str, Any] = field(default_factory=dict)
    asked: float = float("-inf")
    answered: float = float("-inf")
    started: float = 0.0
    again: int = 0
    dead: str = ""
    life: Life = "starting"
    _reply: Reply | None = None
    _sent: float = float("-inf")
    _since: float | None = None  # moment since which the process is awaited

    def turn(self, link: Link, now: float) -> Life:
        """Ask, read what was answered, and judge."""
        if self._since is None:
            self._since = now
        if self._reply is not None and self._reply.there:
            self._read(self._reply, now)
        if self._reply is None:
            try:
                self._reply, self._sent = link.send(self.method), now
            except LinkError:
                self._down(now)
        waiting = now - self._since if self.life in ("starting", "down") else 0.0
        late = self.life == "up" and self._quiet(now) > self._allowed()
        if late or waiting > self.start_deadline:
            self.life = "hung"
        return self.life

    def killed(self, now: float) -> None:
        """The process was ended, and a new one is on its way."""
        self._down(now)
        self._reply, self.dead = None, ""

    def _read(self, reply: Reply, now: float) -> None:
        self._reply = None
        try:
            answer = reply.get(0.1)
        except LinkDown as error:
            self.dead = str(error) if isinstance(error, LinkDead) else ""
            self._down(now)
        except LinkError:
            pass
        else:
            self.answer, self.asked, self.answered = answer, self._sent, now
            self.again += self.started not in (0.0, answer["started"])
            self.started, self.life, self.dead = answer["started"], "up", ""

    def _down(self, now: float) -> None:
        if self.life != "down":
            self._since = now
        self.life = "down" if self.started else "starting"

    def _quiet(self, now: float) -> float:
        """Seconds without a sign of life: of the process, or of its work."""
        return now - self.answered + float(self.answer.get("quiet", 0.0))

    def _allowed(self) -> float:
        return self.start_deadline if self.answer.get("phase") in BUSY else self.deadline
