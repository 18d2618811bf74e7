"""One stream's, or one batch's, stay in a residence: widths, and what the device told so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful.calls import Call
from eventful.config import Config
from eventful.errors import NonFiniteError, UnsupportedError
from eventful.layout import TokenLayout
from eventful.policies import Dials, Policy, dials_of
from eventful.residence import HostPlaces, Launch, Outcome, Residence
from eventful.slots import SlotState
from eventful.state import StreamState
from eventful.step import FlushRequired, StepRecord, join_records

Check = Literal["async", "sync"]
_RING = 6  # two passes a step, and the steps whose reports are still to be read


@dataclass
class _Ticket:
    """A step whose report is on its way to the host.

    Attributes:
        slots, frames: the streams of the step, and their counts of frames before it.
    """

    slots: list[int]
    frames: list[int]
    outcome: Outcome


@dataclass
class _Pass:
    """One forward call of a step. `flush` and `width` are settled when it runs."""

    call: Call
    layouts: dict[str, TokenLayout]
    launch: Launch
    maps: bool
    capture: bool
    flush: bool
    most: int | None
    width: int = 0


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
        self._wanted: dict[int, int] = {}
        self._rings: dict[int, list[HostPlaces]] = {}

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
        self._wanted.clear()

    def forget_slot(self, slot: int) -> None:
        """Expect nothing more of one stream."""
        self._wanted.pop(slot, None)
        for ticket in (*self._pending, *self._before):
            ticket.slots = [-1 if held == slot else held for held in ticket.slots]

    def settle(self, state: SlotState) -> None:
        """Read what the last step told; raise if its frame, or an output, was not finite."""
        last, before = self._pending, self._before
        self._pending, self._before = [], last
        for ticket in last:
            _wait(ticket.outcome.told)
        if last:  # steps come in order, so the one before the last is done
            self._check_sound(before, state)
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
        for slot, frames, (wanted, finite, cut) in zip(
            ticket.slots, ticket.frames, ticket.outcome.report.tolist(), strict=True
        ):
            if slot not in state.rows:
                continue
            row = state.rows.index(slot)
            self._wanted[slot] = wanted
            if not finite:
                state.frames[row] = frames
                bad.append(slot)
            elif cut:
                state.frames[row] = -1
        return bad

    def _check_sound(self, tickets: list[_Ticket], state: SlotState) -> None:
        bad = [
            slot
            for ticket in tickets
            for slot, sound, told in zip(
                ticket.slots,
                ticket.outcome.sound.tolist(),
                ticket.outcome.report.tolist(),
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
        most: int | None,
        maps: bool,
        capture: bool,
    ) -> tuple[Any, Callable[[], StepRecord], tuple[int, bool] | None]:
        """Run one step of the streams in `state`, whose counts of frames are brought up to date.

        Streams that have to flush do so in a pass of their own, so that the others stay cheap.

        Args:
            most: tokens beyond which all of the step runs dense; None for never.

        Returns:
            The model's output, what makes the record, and, where the time of the step says
            something about its cost, the tokens updated and whether it ran dense.
        """
        late = [i for i, frames in enumerate(state.frames) if frames < 0]
        rest = [i for i in range(len(state)) if i not in late]
        if not (late and rest) or not call.plain:
            plan = _Pass(call, layouts, launch, maps, capture, flush=bool(late), most=most)
            result, record, replayed = self._pass(plan, state, policies)
            worth = (plan.width, plan.flush) if replayed else None
            return result, record, worth
        parts = []
        for rows in (late, rest):
            part = state.take(rows)
            assert isinstance(part, SlotState)
            plan = _Pass(
                call.on(call.frame[rows]),
                layouts,
                launch,
                maps,
                capture,
                flush=rows is late,
                most=most,
            )
            parts.append(self._pass(plan, part, [policies[i] for i in rows]))
            state.put(rows, part)
        order = sorted(range(len(state)), key=(late + rest).__getitem__)
        places = torch.tensor(order, device=call.frame.device)
        result = _join([part[0] for part in parts], (len(late), len(rest)), order, places)
        return result, lambda: join_records([part[1]() for part in parts], places), None

    def _pass(
        self, plan: _Pass, state: SlotState, policies: list[Policy]
    ) -> tuple[Any, Callable[[], StepRecord], bool]:
        """One forward call for streams that all flush, or none; tells whether it was a replay."""
        (layout,) = plan.layouts.values()
        dials = [d for policy in policies if (d := dials_of(policy, layout.tokens)) is not None]
        width = layout.tokens if plan.flush else self._width(dials, state, layout)
        fell_back = plan.most is not None and not plan.flush and width > plan.most
        plan.flush = plan.flush or fell_back
        plan.width = layout.tokens if plan.flush else width
        before = list(state.frames)
        try:
            with self.residence.alone(plan.call.frame.device):
                outcome = self.residence.step(
                    plan.call, state, dials, policies, plan.layouts, plan.width, plan.launch,
                    self._host(len(state), plan.call.frame.device),
                    flush=plan.flush, maps=plan.maps, capture=plan.capture,
                )  # fmt: skip
        except FlushRequired:
            plan.flush = True
            return self._pass(plan, state, policies)
        state.frames = [0 if plan.flush else n + 1 for n in before]
        self._pending.append(_Ticket(list(state.rows), before, outcome))

        def record() -> StepRecord:
            made = outcome.record()
            made.fallback = fell_back
            return made

        return outcome.result, record, outcome.replayed

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

    def _width(self, dials: list[Dials], state: SlotState, layout: TokenLayout) -> int:
        wanted = [self._wanted.get(slot) for slot in state.rows]
        return self.residence.width(dials, wanted, layout, self._depth)


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()


def _join(results: list[Any], sizes: tuple[int, int], order: list[int], places: Tensor) -> Any:
    """The outputs of two passes as one, streams in their order.

    Args:
        sizes: streams of each pass.
        order: for each stream its place among those of the first pass, then of the second.
        places: the same as a tensor.
    """

    def per_stream(value: Any, size: int) -> bool:
        if not isinstance(value, list) or len(value) != size:
            return False
        return not any(isinstance(entry, Tensor | tuple | list) for entry in value)

    def join(first: Any, second: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        if first.dim() == 0 or len(first) + len(second) != len(order):
            raise UnsupportedError(
                "Some streams of the batch recompute everything in a pass of their own, but the "
                f"model returns a tensor {tuple(first.shape)} without one row per stream. Step "
                "streams that join on their own first: batch(frame, streams=[name])."
            )
        return torch.cat([first, second]).index_select(0, places)

    if all(map(per_stream, results, sizes)):
        every = [entry for result in results for entry in result]  # a detector's, frame by frame
        return [every[place] for place in order]
    return pytree.tree_map(join, *results)


def residence_of(home: dict[Any, Residence], key: Any, config: Config) -> Residence:
    """The residence of a model for one kind of frame, made on first use."""
    if key not in home:
        home[key] = Residence(config)
    return home[key]
