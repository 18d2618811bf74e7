"""One stream's, or one batch's, stay in a residence: widths, and what the device told so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from eventful.cost.fallback import Demand, Fallback, Timing
from eventful.cost.times import ENOUGH, start_clock
from eventful.engine.call import Call
from eventful.engine.guard import CHANGED
from eventful.engine.passes import split_flushes
from eventful.engine.residence import Launch, Residence
from eventful.engine.work import HostPlaces, Outcome
from eventful.errors import NonFiniteError, WeightsChangedError
from eventful.memory.slots import SlotState
from eventful.memory.state import StreamState
from eventful.policies import Dials, Policy, dials_of
from eventful.rules.record import StepRecord
from eventful.rules.resident import UNCOUNTED
from eventful.rules.step import FlushRequired
from eventful.tokens.layout import TokenLayout

Check = Literal["async", "sync"]
_RING = 6  # two passes a step, and the steps whose reports are still to be read


@dataclass
class _Ticket:
    """A step whose report is on its way to the host.

    Attributes:
        slots, frames: the streams of the step, and their counts of frames before it.
        report: its rows, once it has arrived.
    """

    slots: list[int]
    frames: list[int]
    outcome: Outcome
    report: list[list[int]] = field(default_factory=list)


@dataclass
class _Pass:
    """One forward call of a step.

    Attributes:
        flush: recompute everything.
        dense: the same because it is cheaper; settled when it runs.
        demand: what decided between dense and eventful; None where nothing was decided.
        replayed: the pass was recorded work, whose time says what such passes cost.
        whole: the model can be recorded with all its code; None if that is not known yet.
    """

    call: Call
    layouts: dict[str, TokenLayout]
    launch: Launch
    maps: bool
    capture: bool
    flush: bool
    fallback: Fallback | None
    dense: bool = False
    demand: Demand | None = None
    replayed: bool = False
    whole: bool | None = None


@dataclass(frozen=True)
class _Counts:
    """What a stream's last step counted: tokens that wanted to pass, and that were let pass."""

    wanted: int
    passed: int


class Tenancy:
    """Runs resident steps of some streams, and reads their reports one frame late."""

    def __init__(self, residence: Residence, depth: int, check: Check) -> None:
        self.residence = residence
        self._depth = depth
        self.check = check
        self.names: Callable[[], Sequence[str]] = (
            tuple  # of the streams, in order, if they have some
        )
        self._pending: list[_Ticket] = []
        self._before: list[_Ticket] = []  # their outputs are done once the next has told
        self._counts: dict[int, _Counts] = {}
        self._changed = False  # weights were written to
        self._dials: tuple[Any, tuple[list[Dials], int]] | None = None
        self._rings: dict[int, list[HostPlaces]] = {}

    @property
    def replayed(self) -> bool:
        """Whether the last step was recorded work alone: none of the model's own code ran."""
        return bool(self._pending) and all(
            t.outcome.replayed and t.outcome.whole for t in self._pending
        )

    def _host(self, batch: int, device: torch.device) -> HostPlaces:
        """Host memory for one step; what the two steps before it told stays readable."""
        ring = self._rings.setdefault(batch, [])
        if len(ring) < _RING:
            ring.append(HostPlaces.make(batch, device))
        else:
            ring.append(ring.pop(0))
        return ring[-1]

    def move_in(self, state: StreamState) -> SlotState:
        """The state in slots of the residence."""
        return SlotState.move_in(self.residence.pool, state)

    def forget(self) -> None:
        """Expect nothing more of steps past."""
        self._pending, self._before = [], []
        self._counts.clear()

    def forget_slot(self, slot: int) -> None:
        """Expect nothing more of one stream."""
        self._counts.pop(slot, None)
        for ticket in (*self._pending, *self._before):
            ticket.slots = [-1 if held == slot else held for held in ticket.slots]

    def settle(self, state: SlotState) -> None:
        """Read what the last step told; raise if its frame, or an output, was not finite."""
        last, before = self._pending, self._before
        self._pending, self._before = [], last
        for ticket in last:
            if ticket.outcome.told is not None:
                ticket.outcome.told.synchronize()
            ticket.report = ticket.outcome.report.tolist()
        if last:  # steps come in order, so the one before the last is done
            self._check_sound(before, state)
        if any([row[4] > 0 for ticket in last for row in ticket.report]):
            self._changed = True
        if self._changed:  # until the stream starts over
            raise WeightsChangedError(CHANGED.format(what="weights"))
        bad = [slot for ticket in last for slot in self._read(ticket, state)]
        if bad:
            self._before = []
            raise NonFiniteError(
                f"The last frame contained NaN or Inf{self._among(bad, state)}. It was not used "
                "and what it returned is not valid; the stream is as it was before it. Go on with "
                "the next good frame, or pass check='sync' to be told at once.",
                streams=self._named(bad, state),
            )

    def _read(self, ticket: _Ticket, state: SlotState) -> list[int]:
        """Take in a report; returns the slots whose frame was not finite."""
        bad = []
        for slot, frames, (wanted, finite, cut, passed, _) in zip(
            ticket.slots, ticket.frames, ticket.report, strict=True
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
                self._counts[slot] = _Counts(wanted, passed)
            if finite and cut:
                state.frames[row] = -1
        return bad

    def _check_sound(self, tickets: list[_Ticket], state: SlotState) -> None:
        bad = [
            slot
            for ticket in tickets
            for slot, sound, told in zip(
                ticket.slots,
                ticket.outcome.sound.tolist(),
                ticket.report,
                strict=True,
            )
            if slot in state.rows and told[1] and not sound
        ]
        if bad:
            self.forget()
            for slot in bad:
                state.frames[state.rows.index(slot)] = -1
            raise NonFiniteError(
                f"NaN or Inf arose inside the model{self._among(bad, state)}. The next frame "
                "recomputes everything; check the frames' range, or run the model in a wider "
                "dtype.",
                streams=self._named(bad, state),
            )

    def step(
        self,
        call: Call,
        state: SlotState,
        policies: list[Policy],
        layouts: dict[str, TokenLayout],
        launch: Launch,
        *,
        fallback: Fallback | None,
        maps: bool,
        capture: bool,
    ) -> tuple[Any, Callable[[], StepRecord], Timing | None]:
        """Run one step of the streams in `state`, whose counts of frames are brought up to date.

        Streams that have to flush do so in a pass of their own, so that the others stay cheap.

        Args:
            fallback: decides whether all of the step runs dense; None for never.

        Returns:
            The model's output, what makes the record, and what the time of the step says about
            costs; None where it says nothing.
        """
        parts_of = split_flushes(state, call)
        if parts_of is None:
            late = min(state.frames) < 0
            plan = _Pass(call, layouts, launch, maps, capture, late, fallback)
            result, record = self._pass(plan, state, policies)
            if plan.flush and fallback is not None and call.frame.is_cuda and not maps:
                self._time_dense(plan, state, policies)
            if not plan.replayed and call.frame.is_cuda:
                return result, record, None
            return result, record, Timing(plan.demand, plan.flush or plan.dense)
        parts = []
        for rows in parts_of.rows:
            part = state.take(rows)
            assert isinstance(part, SlotState)
            plan = _Pass(
                call.on(call.frame[rows]),
                layouts,
                launch,
                maps,
                capture,
                flush=rows is parts_of.rows[0],
                fallback=fallback,
            )
            parts.append(self._pass(plan, part, [policies[i] for i in rows]))
            state.put(rows, part)
        result = parts_of.join([part[0] for part in parts])
        return result, lambda: parts_of.join_records([part[1]() for part in parts]), None

    def _pass(
        self, plan: _Pass, state: SlotState, policies: list[Policy]
    ) -> tuple[Any, Callable[[], StepRecord]]:
        """One forward call for streams that all flush, or none."""
        (layout,) = plan.layouts.values()
        tokens = layout.tokens
        dials, forced = self._dialled(policies, layout)
        known = [self._counts.get(slot) for slot in state.rows]
        if plan.fallback is not None and not plan.flush:
            plan.demand = _demand(dials, known, forced, tokens)
            plan.dense = plan.demand is not None and plan.fallback.decide(plan.demand)
        width = tokens
        if not plan.flush and not plan.dense:
            passed = [None if counts is None else counts.passed for counts in known]
            width = self.residence.width(dials, passed, tokens, forced)
        before = list(state.frames)
        try:
            with self.residence.one:
                outcome = self.residence.step(
                    plan.call, state, dials, policies, plan.layouts, width, plan.launch,
                    self._host(len(state.rows), plan.call.frame.device),
                    flush=plan.flush, dense=plan.dense, maps=plan.maps, capture=plan.capture,
                )  # fmt: skip
        except FlushRequired:
            plan.flush, plan.dense = True, False
            return self._pass(plan, state, policies)
        state.frames = [0 if plan.flush or plan.dense else n + 1 for n in before]
        self._pending.append(_Ticket(list(state.rows), before, outcome))
        plan.replayed, plan.whole = outcome.replayed, outcome.whole

        def record() -> StepRecord:
            made = outcome.record()
            made.fallback = plan.dense
            return made

        return outcome.result, record

    def _dialled(self, policies: list[Policy], layout: TokenLayout) -> tuple[list[Dials], int]:
        """The policies' dials, and how many tokens pass on top; kept while neither changes."""
        asked = (tuple(policies), layout)
        if self._dials is None or self._dials[0] != asked:
            made = [d for policy in policies if (d := dials_of(policy, layout.tokens)) is not None]
            self._dials = (asked, (made, self.residence.forced(layout, self._depth)))
        return self._dials[1]

    def _time_dense(self, plan: _Pass, state: SlotState, policies: list[Policy]) -> None:
        """Time dense steps on the frame that was just flushed; its memory stays the same.

        Without it a stream would have to run dense in the middle of a calm scene to learn what
        that costs. Models that cannot be recorded whole are left alone: the code around their
        blocks runs in every step and may not expect a frame twice.
        """
        assert plan.fallback is not None
        kept = list(self._pending)
        for _ in range(ENOUGH + 2):
            if plan.whole is False or plan.fallback.costs.dense_known:
                break
            again = replace(plan, replayed=False, fallback=None)
            clock = start_clock(plan.call.frame.device)
            self._pass(again, state, policies)
            read = clock()
            if again.replayed:
                plan.fallback.costs.note(0, read(), dense=True)
            plan.whole = again.whole
        self._pending = kept

    def settle_now(self, state: SlotState) -> None:
        """With check='sync', wait for the step just queued and raise if it failed."""
        if self.check == "sync":
            tickets, self._before = self._pending, []
            for ticket in tickets:
                if ticket.outcome.told is not None:
                    torch.cuda.current_stream().synchronize()
            self.settle(state)
            self._before = []
            self._check_sound(tickets, state)

    def _named(self, bad: list[int], state: SlotState) -> tuple[str, ...]:
        names = self.names()
        return tuple(names[state.rows.index(slot)] for slot in bad) if names else ()

    def _among(self, bad: list[int], state: SlotState) -> str:
        """Which of several streams, if there are several."""
        if len(state) == 1:
            return ""
        named = ", ".join(map(repr, self._named(bad, state)))
        places = ", ".join(str(state.rows.index(slot)) for slot in bad)
        return f" (stream {named or places} of {len(state)} in the batch)"


def _demand(
    dials: list[Dials], known: list[_Counts | None], forced: int, tokens: int
) -> Demand | None:
    """What decides between dense and eventful; None where a stream's counts are not known."""
    wanted, updated = [], []
    for dial, counts in zip(dials, known, strict=True):
        most = min(dial.cap + forced, tokens)
        if dial.level == -math.inf:  # a fixed number, known before any step has reported
            counts = _Counts(most, most)
        if counts is None:
            return None
        updated.append(min(counts.wanted, most))
        wanted.append(updated[-1] if dial.budget else counts.wanted)
    return Demand(max(wanted), max(updated))
