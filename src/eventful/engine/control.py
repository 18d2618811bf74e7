"""A stream's budget at work: what it hears of each step, and what it wants of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eventful.budget.audit import AuditLog
from eventful.budget.base import Budget, BudgetReport, Controller, Facts, Told, Turn
from eventful.budget.memory import MemoryBudget
from eventful.config import Config
from eventful.cost import counting, times
from eventful.engine.executor import StepResult
from eventful.engine.widths import fitting
from eventful.errors import ConfigError
from eventful.policies import Policy
from eventful.policies.base import refresh_period
from eventful.rules.record import StepRecord

_QUEUED = 2  # steps of a device whose times are still to come
_WARM_UP = 4  # steps in a row whose times are not believed, where they say they are unusual


def checked_budget(budget: Any, config: Config, *, batch: bool) -> Budget | None:
    """A budget that a config can hold, or None.

    Args:
        batch: for streams that come and go.
    """
    if budget is None:
        return None
    if not isinstance(budget, Budget):
        raise ConfigError(
            f"A budget is one of eventful.budget, e.g. ErrorBudget(0.1); got {budget!r}. For a "
            "number of tokens assign a policy, e.g. stream.policy = TopR(256)."
        )
    if config.gating not in budget.gatings:
        raise ConfigError(
            f"{type(budget).__name__} needs gating {' or '.join(map(repr, budget.gatings))} "
            f"(Config.fast); this model was converted with {config.gating!r}."
        )
    if batch and budget.audits:
        raise ConfigError(
            f"{type(budget).__name__} holds the error of one video; give each a Stream of its own. "
            "A batch shares tokens: OperationsBudget, LatencyBudget, or the policy Shared."
        )
    return budget


def facts_of(
    record: StepRecord, config: Config, state_bytes: int, *, shared: bool, slots: bool
) -> Facts:
    """What a budget may know of a stream, from the record of a dense step.

    Args:
        state_bytes: held for one stream.
        shared: the streams of a batch share what there is.
        slots: steps have a number of slots for selected tokens.
    """
    shapes = [block.shape for block in record.blocks.values()]
    tokens = shapes[0].tokens
    layout = next(iter(record.layouts.values()))
    forced = layout.prefix + layout.suffix if config.protect else 0
    if config.max_age is not None:
        forced += -(-tokens // refresh_period(config.max_age, len(shapes)))
    able = [i for i, shape in enumerate(shapes) if shape.window is None]
    followed = set(config.context.spread(able)) if config.context is not None else set()

    def operations(count: int) -> int:
        total = counting.Operations()
        for i, shape in enumerate(shapes):
            keys = min(count, shape.keys)
            work = counting.BlockWork(
                count, keys, count, count, context=keys if i in followed else 0
            )
            total = total + counting.count_block(shape, config, work)
        if config.gating == "frame":
            total = total + counting.count_frame_gate(tokens, shapes[0].dim)
        for numbers in record.positions.values():
            total = total + counting.count_positions(*numbers)
        if config.motion and shapes[0].grid is not None:
            height, width = shapes[0].grid
            total = total + counting.count_motion(height * width, shapes[0].dim, 2)
        return total.total

    return Facts(
        tokens=tokens,
        forced=min(forced, tokens),
        operations=operations,
        dense_operations=record.dense_macs // len(record.flushed),
        state_bytes=state_bytes,
        shared=shared,
        fit=(lambda count: fitting(count, tokens)) if slots else int,
    )


@dataclass
class Control:
    """Keeps one budget of a stream or a batch.

    Attributes:
        facts: made at the first step after another that has a budget.
        wanted: of the step that is running or was last.
        every: compare each so many steps with the dense model; None for never.
        asked: assigned, perhaps while a step is running; it is held from the next one on.
    """

    budget: Budget | None = None
    asked: Budget | None = None
    every: int | None = None
    log: AuditLog = field(default_factory=AuditLog)
    facts: Facts | None = None
    wanted: Turn = field(default_factory=Turn)
    _controller: Controller | None = None
    _clocks: list[tuple[Told | None, Callable[[], float], float | None]] = field(
        default_factory=list
    )
    _started: float | None = None
    _interval: float | None = None
    _error: Callable[[], float] | None = None
    _audited: Told | None = None
    _later: bool = False
    _unusual: int = 0

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self.asked is not None or self.budget is not None or self.every is not None

    def _change(self) -> None:
        """Hold what was asked for from now on."""
        self.budget, self._controller, self.wanted = self.asked, None, Turn()
        self._error = self._audited = None
        self._clocks = self._clocks[-1:]

    def forget(self) -> None:
        """Start over, e.g. for frames of another size."""
        self._change()
        self.facts, self._clocks, self.log = None, [], AuditLog()
        self._started = self._interval = None

    def start(self) -> None:
        """A step begins."""
        if self.asked is not self.budget:
            self._change()
        began = times.now() * 1000
        self._interval = None if self._started is None else began - self._started
        self._started = began

    def choose(self, told: Told | None, streams: int) -> Policy | None:
        """Hear what the last step told, and say which policy the next has; None for its own."""
        if self.budget is None or self.facts is None:
            return None
        self.check_memory(streams)
        if self._controller is None:
            self._controller = self.budget.controller(self.facts)
        self._hear(self._controller, told)
        self.wanted = self._controller.turn()
        return self.wanted.policy

    def _hear(self, controller: Controller, told: Told | None) -> None:
        if self._audited is not None and self._error is not None:
            controller.audited(self._audited, self._error())
        self._audited = self._error = None
        if told is not None:
            controller.learn(told)
        if self._clocks and self._clocks[-1][0] is None:
            self._clocks[-1] = (told, *self._clocks[-1][1:])
        while self._clocks and (len(self._clocks) > _QUEUED or not self._later):
            about, read, interval = self._clocks.pop(0)
            if about is not None:
                controller.timed(about, read(), interval)

    def check_memory(self, streams: int) -> None:
        """Refuse streams that do not fit, as far as that is known."""
        if isinstance(self.asked, MemoryBudget) and self.facts is not None:
            self.asked.check(self.facts.state_bytes, streams)

    def stepped(self, done: StepResult, *, later: bool) -> None:
        """A step was started; on a device its time comes later."""
        self._later = later
        self._unusual = 0 if done.usual else self._unusual + 1
        if 0 < self._unusual <= _WARM_UP:  # some models never do better
            return
        if done.clock is not None and self.budget is not None:
            self._clocks.append((None, done.clock, self._interval))
            del self._clocks[: -2 * _QUEUED]

    def compared(self, told: Told | None, error: Callable[[], float]) -> None:
        """A step was compared with a dense one that the stream goes on from."""
        self._audited, self._error = told, error
        if self._clocks:
            self._clocks.pop()

    def report(self) -> BudgetReport | None:
        """How the budget is doing; None without one, or before the first frame."""
        return None if self._controller is None else self._controller.report()
