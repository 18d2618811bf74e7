"""Steps on the host: transactions that are undone bit for bit if they fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eventful.budget.base import Told
from eventful.cost.fallback import Timing
from eventful.cost.times import start_clock
from eventful.engine.call import Call
from eventful.engine.dense import Fallbacks
from eventful.engine.executor import Executor, StepResult
from eventful.engine.frames import check_finite, rows_not_finite
from eventful.engine.launch import launch
from eventful.engine.passes import split_flushes
from eventful.engine.plan import StepPlan
from eventful.engine.view import ModelView
from eventful.errors import NonFiniteError
from eventful.memory.state import RowState
from eventful.rules.record import StepRecord
from eventful.rules.step import FlushRequired, Step
from eventful.surgery.session import Session


@dataclass
class HostExecutor(Executor):
    """Runs a step operator by operator; the host may read any result.

    Attributes:
        partial: a frame that is not finite is left out while the other streams are stepped.
    """

    session: Session
    state: RowState
    fallbacks: Fallbacks
    partial: bool = False

    def __post_init__(self) -> None:
        self._constants: dict[Any, Any] = {}
        self._seen = False
        self._last: StepRecord | None = None

    def settle(self) -> None:
        """Nothing is in flight."""

    def told(self) -> Told | None:
        """See `Executor`."""
        record, self._last = self._last, None
        if record is None:
            return None
        gate, block = next(iter(record.gates.values())), next(iter(record.blocks.values()))
        share = float(gate.counts.float().mean()) / block.shape.tokens
        return Told(share, record.estimate, all(record.flushed))

    def finish(self) -> None:
        """Nothing is in flight."""

    def leave(self, row: int) -> None:
        """See `Executor`."""
        self.state.drop_row(row)

    def close(self) -> None:
        """See `Executor`."""
        self.state.release()
        self._constants.clear()

    def step(self, rows: Sequence[int], plan: StepPlan, call: Call, view: ModelView) -> StepResult:
        """See `Executor`."""
        bad = list(rows_not_finite(call.frame))
        if bad and not (self.partial and len(bad) < len(rows) and call.divisible):
            check_finite(call.frame)
        good = list(range(len(rows)))
        if bad:
            good = [place for place in range(len(rows)) if place not in bad]
            rows, call = [rows[place] for place in good], call.part(good)
            plan = plan.of_rows(good)
        try:
            output, record = self._passes(rows, plan, call, view)
        except NonFiniteError as error:
            if not bad:
                raise
            places = sorted([*bad, *(good[row] for row in error.rows)])
            raise NonFiniteError(str(error), rows=tuple(places)) from None
        self._seen, self._last = True, record
        return StepResult(output, lambda: record, left_out=bad, clock=record.clock)

    def _passes(
        self, rows: Sequence[int], plan: StepPlan, call: Call, view: ModelView
    ) -> tuple[Any, StepRecord]:
        """Streams that flush and the others in a pass each, or all in one."""
        state = self.state.take(rows)
        passes = split_flushes(state, call)
        if passes is None:
            output, record = self._pass(state, plan, call, view)
            self.state.put(rows, state)
            return output, record
        done = []
        for places in passes.rows:  # on copies of the state: either both passes count, or none
            part = state.take(places)
            frames = call.part(places)
            done.append((part, *self._pass(part, plan.of_rows(places), frames, view)))
        output = passes.join([made[1] for made in done])
        for places, (part, *_) in zip(passes.rows, done, strict=True):
            self.state.put([rows[i] for i in places], part)
        return output, passes.join_records([made[2] for made in done])

    def _pass(
        self, state: RowState, plan: StepPlan, call: Call, view: ModelView
    ) -> tuple[Any, StepRecord]:
        """Run one pass, again as a flush where it needs memory that is not there."""
        flushing = [frames < 0 for frames in state.frames]
        try:
            return self._attempt(state, plan, call, view, flushing)
        except FlushRequired:
            return self._attempt(state, plan, call, view, [True] * len(state))

    def _attempt(
        self, state: RowState, plan: StepPlan, call: Call, view: ModelView, flushing: list[bool]
    ) -> tuple[Any, StepRecord]:
        fallback = None
        if plan.dense is None:
            fallback = self.fallbacks.of(call.frame, plan.layouts)  # for as many frames as run here
        step = Step(
            plan.config, state, plan.policies, flushing, plan.layouts, plan.maps,
            dense_if=None if fallback is None else fallback.decide,
            constants=self._constants, hint=call.motion, structure=view.structure,
        )  # fmt: skip
        clock = start_clock(call.frame.device)
        state.begin()
        try:
            output = launch(self.session, step, call.run)
        except BaseException:
            state.rollback()
            raise
        state.frames = [
            0 if flush else n + 1 for flush, n in zip(step.flushing, state.frames, strict=True)
        ]
        state.commit()
        step.record.clock = clock()
        if fallback is not None and step.flush_any == step.flush_all:
            timing = Timing(step.demand, step.flush_all)
            fallback.note(timing, step.record.clock, first=not self._seen, later=False)
        return output, step.record
