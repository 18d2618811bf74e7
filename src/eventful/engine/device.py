"""Steps that never wait for the host: their reports are read one frame later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eventful import ops
from eventful.budget.base import Told
from eventful.cost.fallback import Demand, Timing
from eventful.cost.times import ENOUGH, start_clock
from eventful.engine.call import Call
from eventful.engine.executor import Check, Executor, StepResult
from eventful.engine.guard import CHANGED
from eventful.engine.passes import split_flushes
from eventful.engine.plan import ResidentPlan, StepPlan
from eventful.engine.request import HostBuffers, Outcome, StepRequest
from eventful.engine.store import DeviceStore, current_stream
from eventful.engine.view import ModelView
from eventful.engine.widths import Counts, demand_of, rows_of, width_of
from eventful.errors import NonFiniteError, WeightsChangedError
from eventful.memory.slots import SlotState
from eventful.memory.state import RowState
from eventful.rules.gate import UNCOUNTED
from eventful.rules.record import StepRecord
from eventful.rules.step import FlushRequired
from eventful.surgery.session import Session

_RING = 6  # two passes a step, and the steps whose reports are still to be read


@dataclass
class _InFlight:
    """A pass whose report is on its way to the host.

    Attributes:
        slots, frames: the streams of the pass, and their counts of frames before it.
        whole: everything was recomputed.
        width: slots of each selection.
        report: its rows, once it has arrived.
    """

    slots: list[int]
    frames: list[int]
    outcome: Outcome
    whole: bool = False
    width: int = 0
    report: list[list[int]] = field(default_factory=list)


class DeviceExecutor(Executor):
    """Steps streams whose memory is in the slots of a store.

    Args:
        names: gives the streams' names, in order, where they have some.
    """

    def __init__(
        self, session: Session, store: DeviceStore, rows: RowState, check: Check,
        names: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        self.session, self.store, self.check = session, store, check
        with store.lock:
            self.state: SlotState = SlotState.from_rows(store.pool, rows)
        self._added = store.pool.added
        self._names = names
        self._depth = sum(len(blocks) for blocks in session.blocks.values())
        self._pending: list[_InFlight] = []
        self._before: list[_InFlight] = []  # their outputs are done once the next has reported
        self._counts: dict[int, Counts] = {}
        self._written = False  # weights were written to
        self._resident: tuple[StepPlan, ResidentPlan] | None = None
        self._rings: dict[int, list[HostBuffers]] = {}
        self._stepped = False
        self._heard: list[_InFlight] | None = None
        self._tokens = 0

    def leave(self, row: int) -> None:
        """See `Executor`."""
        slot = self.state.rows[row]
        self._counts.pop(slot, None)
        for flight in (*self._pending, *self._before):
            flight.slots = [-1 if held == slot else held for held in flight.slots]
        self.state.drop_row(row)

    def close(self) -> None:
        """See `Executor`."""
        self._pending, self._before = [], []
        self.state.release()
        if self.store.idle:
            stores = self.session.stores
            for key in [key for key, store in stores.items() if store is self.store]:
                stores.pop(key).close()

    def step(self, rows: Sequence[int], plan: StepPlan, call: Call, view: ModelView) -> StepResult:
        """See `Executor`."""
        with self.store.lock:
            self.store.use_weights(view)
        if self.store.pool.added != self._added:  # another stream made room for more than this has
            self._added = self.store.pool.added
            self.flush(range(len(self.state)))
        state = self.state.take(rows)
        request = StepRequest(
            self.session, plan, self._resident_plan(plan), call, state,
            capture=not view.hooked(), structure=view.structure,
        )  # fmt: skip
        clock = start_clock(call.frame.device, current_stream(call.frame.device))
        try:
            output, record, timing = self._passes(request)
        except BaseException:
            state.rollback()
            self.state.put(rows, state)
            raise
        self.state.put(rows, state)
        read = clock()
        if plan.fallback is not None and timing is not None:
            later = call.frame.is_cuda
            plan.fallback.note(timing, read, first=not self._stepped, later=later)
        self._stepped = True

        def timed() -> StepRecord:
            made = record()
            made.clock = read
            return made

        ran = not self._replayed()
        return StepResult(output, timed, ran_model=ran, clock=read, usual=timing is not None)

    def _replayed(self) -> bool:
        """Whether the last step was recorded work alone: none of the model's own code ran."""
        return bool(self._pending) and all(
            flight.outcome.replayed and flight.outcome.whole for flight in self._pending
        )

    def _resident_plan(self, plan: StepPlan) -> ResidentPlan:
        if self._resident is None or self._resident[0] is not plan:
            self._resident = (plan, ResidentPlan.of(plan, self._depth))
        return self._resident[1]

    def _passes(self, request: StepRequest) -> tuple[Any, Callable[[], StepRecord], Timing | None]:
        """Streams that flush in a pass of their own, so that the others stay cheap.

        Returns:
            The model's output, what makes the record, and what the time of the step says about
            costs; None where it says nothing.
        """
        state, call = request.state, request.call
        passes = split_flushes(state, call)
        if passes is None:
            request.flush = min(state.frames) < 0
            outcome, demand = self._pass(request)
            if request.flush and request.plan.fallback is not None and not request.plan.maps:
                self._time_dense(request, outcome)
            timing = Timing(demand, request.flush or request.dense)
            timed = outcome.replayed or not call.frame.is_cuda
            return outcome.output, outcome.record, timing if timed else None
        outcomes = []
        for rows in passes.rows:
            some = replace(
                request,
                call=call.part(rows),
                state=state.take(rows),
                plan=request.plan.of_rows(rows),
                flush=rows is passes.rows[0],
            )
            some.resident = ResidentPlan.of(some.plan, self._depth)
            outcomes.append(self._pass(some)[0])
            state.put(rows, some.state)
        output = passes.join([outcome.output for outcome in outcomes])
        records = [outcome.record for outcome in outcomes]
        return output, lambda: passes.join_records([record() for record in records]), None

    def _pass(self, request: StepRequest) -> tuple[Outcome, Demand | None]:
        """One forward call for streams that all flush, or none; `request` is completed."""
        state, fallback, resident = request.state, request.plan.fallback, request.resident
        known = [self._counts.get(slot) for slot in state.rows]
        demand = None
        if fallback is not None and not request.flush:
            demand = demand_of(resident, known)
            request.dense = demand is not None and fallback.decide(demand)
        request.width, request.rows = resident.tokens, None
        self._tokens = resident.tokens
        if not request.flush and not request.dense:
            config = request.plan.config
            request.width = width_of(resident, known, steady=config.deterministic)
            if config.gating == "frame":
                request.rows = rows_of(resident, known, request.width, steady=config.deterministic)
        before = list(state.frames)
        try:
            with self.store.lock:
                host = self._host(len(state), request.call.frame.device)
                outcome = self.store.run(request, host)
                self.store.pool.complete = True
        except FlushRequired:
            request.flush, request.dense = True, False
            return self._pass(request)
        if self.store.pool.added != self._added:  # streams beside those of the pass lack it
            self._added = self.store.pool.added
            others = set(self.state.rows) - set(state.rows)
            self.flush([self.state.rows.index(slot) for slot in others])
        state.frames = [0 if request.flush or request.dense else n + 1 for n in before]
        whole = request.flush or request.dense
        self._pending.append(_InFlight(list(state.rows), before, outcome, whole, request.width))
        if request.dense:
            outcome.record = _as_fallback(outcome.record)
        return outcome, demand

    def _host(self, batch: int, device: torch.device) -> HostBuffers:
        """Host memory for one pass; what the two steps before it reported stays readable."""
        ring = self._rings.setdefault(batch, [])
        if len(ring) < _RING:
            ring.append(HostBuffers.make(batch, device))
        else:
            ring.append(ring.pop(0))
        return ring[-1]

    def _time_dense(self, request: StepRequest, outcome: Outcome) -> None:
        """Time dense steps on the frame that was just flushed; its memory stays the same.

        Without it a stream would have to run dense in the middle of a calm scene to learn what
        that costs. Models that cannot be recorded whole are left alone: the code around their
        blocks runs in every step and may not expect a frame twice.
        """
        fallback, device = request.plan.fallback, request.call.frame.device
        assert fallback is not None
        kept, whole = list(self._pending), outcome.whole
        plan = replace(request.plan, fallback=None)
        try:
            for _ in range(ENOUGH + 2):
                if device.type != "cuda" or whole is False or fallback.costs.dense_known:
                    break
                clock = start_clock(device)
                again, _ = self._pass(replace(request, plan=plan))
                read = clock()
                if again.replayed:
                    fallback.costs.note(0, read(), dense=True)
                whole = again.whole
        finally:
            self._pending = kept

    def settle(self) -> None:
        """Read what the last step reported; raise if its frame, or an output, was not finite."""
        last, before = self._pending, self._before
        if last:
            self._pending, self._before = [], last
        for flight in last:
            if flight.outcome.reported is not None:
                flight.outcome.reported.synchronize()
            flight.report = flight.outcome.report.tolist()
        if last:  # steps come in order, so the one before the last is done
            self._check_sound(before)
        if any([row[4] > 0 for flight in last for row in flight.report]):
            self._written = True
        if self._written:  # until the stream starts over
            raise WeightsChangedError(CHANGED.format(what="weights"))
        bad = [slot for flight in last for slot in self._read(flight)]
        if bad:
            self._before = []
            raise NonFiniteError(
                f"The last frame contained NaN or Inf{self._among(bad)}. It was not used "
                "and what it returned is not valid; the stream is as it was before it. Go on with "
                "the next good frame. With check='sync' each step waits and reports its own frame.",
                streams=self._named(bad),
            )

    def told(self) -> Told | None:
        """See `Executor`; of the step before the one that is queued."""
        flights = self._pending or self._before
        if not flights:
            return None
        if flights is self._heard or not all(flight.report for flight in flights):
            return None
        self._heard = flights
        rows = [(flight.whole, row) for flight in flights for row in flight.report]
        tokens = self._tokens or 1
        shares = [1.0 if whole else row[3] / tokens for whole, row in rows]
        known = [0 if whole else row[5] for whole, row in rows]
        estimate = max(known) / ops.UNIT if min(known) >= 0 else None
        paid = max(flight.width for flight in flights) / tokens
        return Told(sum(shares) / len(shares), estimate, all(whole for whole, _ in rows), paid)

    def drain(self) -> None:
        """See `Executor`: outputs of the last step are looked at, too."""
        self.settle()
        flights, self._before = self._before, []
        if any(flight.outcome.reported is not None for flight in flights):
            torch.cuda.current_stream().synchronize()
        self._check_sound(flights)

    def add_row(self) -> int:
        """See `Executor`."""
        with self.store.lock:
            return self.state.add_row()

    def _read(self, flight: _InFlight) -> list[int]:
        """Take in a report; returns the slots whose frame was not finite."""
        bad, state = [], self.state
        for slot, frames, (wanted, finite, cut, passed, *_) in zip(
            flight.slots, flight.frames, flight.report, strict=True
        ):
            if slot not in state.rows:
                continue
            row = state.rows.index(slot)
            if not finite:
                state.frames[row] = frames
                bad.append(slot)
            elif cut or wanted == UNCOUNTED:
                self._counts.pop(slot, None)
            else:
                self._counts[slot] = Counts(wanted, passed)
            if finite and cut:
                state.frames[row] = -1
        return bad

    def _check_sound(self, flights: list[_InFlight]) -> None:
        state = self.state
        bad = [
            slot
            for flight in flights
            for slot, sound, row in zip(
                flight.slots, flight.outcome.sound.tolist(), flight.report, strict=True
            )
            if slot in state.rows and row[1] and not sound
        ]
        if bad:
            self._pending, self._before = [], []
            self._counts.clear()
            for slot in bad:
                state.frames[state.rows.index(slot)] = -1
            raise NonFiniteError(
                f"NaN or Inf arose inside the model{self._among(bad)}. The next frame "
                "recomputes everything; check the frames' range, or run the model in a wider "
                "dtype.",
                streams=self._named(bad),
            )

    def finish(self) -> None:
        """See `Executor`."""
        if self.check == "sync":
            self.drain()

    def _named(self, bad: list[int]) -> tuple[str, ...]:
        names = self._names()
        return tuple(names[self.state.rows.index(slot)] for slot in bad) if names else ()

    def _among(self, bad: list[int]) -> str:
        """Which of several streams, if there are several."""
        if len(self.state) == 1:
            return ""
        named = ", ".join(map(repr, self._named(bad)))
        places = ", ".join(str(self.state.rows.index(slot)) for slot in bad)
        return f" (stream {named or places} of {len(self.state)} in the batch)"


def _as_fallback(record: Callable[[], StepRecord]) -> Callable[[], StepRecord]:
    """The record of a step that ran dense because that was cheaper."""

    def make() -> StepRecord:
        made = record()
        made.fallback = True
        return made

    return make
