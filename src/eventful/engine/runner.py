"""What one stream and a batch of streams share: guards around a step, and its transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.config import Config, policies_set
from eventful.cost.fallback import Timing
from eventful.cost.times import start_clock
from eventful.engine import residence
from eventful.engine.advice import judge_frame
from eventful.engine.call import Call
from eventful.engine.dense import Fallbacks
from eventful.engine.exclusive import Exclusive
from eventful.engine.frames import (
    Signature,
    batched,
    cannot_take,
    check_finite,
    describe,
    is_refusal,
    signature_of,
)
from eventful.engine.guard import Census, WeightGuard, check_mode
from eventful.engine.passes import split_flushes
from eventful.engine.tenancy import Check, Tenancy
from eventful.engine.work import current_stream
from eventful.errors import (
    ConcurrentUseError,
    ConfigError,
    EventfulError,
    FrameError,
    GradientError,
    StreamClosedError,
    UnsupportedError,
)
from eventful.memory.slots import SlotState
from eventful.memory.state import StreamState
from eventful.policies import Policy
from eventful.rules.record import StepRecord
from eventful.rules.step import FlushRequired, Step
from eventful.surgery.conversion import find_session, plain_attention
from eventful.surgery.session import Session
from eventful.surgery.wrappers import checked_model, refuse_wrappers
from eventful.tokens.layout import TokenLayout


class Stepper:
    """Owns the state of some streams; after a step that failed they go on with right results."""

    def __init__(self, model: nn.Module, *, maps: bool = False, check: Check = "async") -> None:
        session = find_session(checked_model(model, type(self).__name__))
        if session is None:
            raise ConfigError(
                "This model is not converted; call eventful.convert(model, config) first."
            )
        trunks = [trunk for trunk, _ in session.trunks.values()]
        refuse_wrappers(model, trunks, f"eventful.{type(self).__name__}(converted)")
        self.model = model
        self.config: Config = session.config
        self.maps = maps
        self._tenancy: Tenancy | None = None
        self.check = check
        self._last: Callable[[], StepRecord] | None = None
        self._lodging: tuple[Any, str | None] = (None, "")  # what was asked last, and the answer
        self._session: Session = session
        self._state = StreamState(0)
        self._signature: Signature | None = None
        self._weights = WeightGuard(model, session)
        self._constants: dict[Any, Any] = {}
        self._fallbacks = Fallbacks(session)
        self._structure: int | None = None  # of the census the step runs under
        self._described: Tensor | None = None  # the frame being stepped, for messages
        self._steps = 0
        self._sized: tuple[tuple[int, int], dict[str, TokenLayout]] | None = None
        self._busy = threading.Lock()
        self._closed = False
        self._ran = True  # the model's own code ran in the last step

    @property
    def check(self) -> Check:
        """When steps on a GPU report a bad frame; another takes effect from the next step on."""
        return self._check

    @check.setter
    def check(self, check: Check) -> None:
        if check not in get_args(Check):
            raise ConfigError(f"check is 'async' or 'sync'; got {check!r}.")
        self._check: Check = check
        if self._tenancy is not None:
            self._tenancy.check = check

    def _about(self, policy: Policy | None) -> str:
        """The model, the rule and what is held, in a few words; waits for no device."""
        seen, signature = "no frame yet", batched(self._signature, len(self._state))
        if signature is not None:
            count = f"{self._steps} step{'' if self._steps == 1 else 's'}"
            seen = f"{describe(signature)}, {count}, {self.nbytes / 1e6:.3g} MB"
        chosen = "no policy" if policy is None else repr(policy)
        return f"{type(self.model).__name__}, {self.config.rule}, {chosen}, {seen}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A stream cannot be copied or pickled. Write a snapshot, and load it with the model: "
            "Stream.load(model, stream.snapshot())."
        )

    def _names(self) -> Sequence[str]:
        """Names of the streams, where they have names."""
        return ()

    @property
    def last(self) -> StepRecord | None:
        """What the last step did."""
        if self._last is None:
            return None
        record = self._last()
        self._last = lambda: record
        return record

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return self._state.nbytes

    def reset(self) -> None:
        """Forget everything; the next frame may have another size, and flushes."""
        with self._alone():
            self._tenancy = None
            self._clear()
            self._signature = None
            self._weights.drop()
            self._constants.clear()
            self._fallbacks.clear()
            self._last = None
            self._steps = 0

    def close(self) -> None:
        """Give the memory back; the stream cannot be stepped any more.

        On a GPU the memory of a model's streams of one frame size, and what was recorded for
        them, goes with the last of them.
        """
        with self._alone(closing=True):
            self._closed = True
            tenancy, self._tenancy = self._tenancy, None
            if isinstance(self._state, SlotState):
                self._state.give_back()
            self._state = StreamState(0)
            self._constants.clear()
            self._weights.drop()
            self._last = None
            if tenancy is not None and tenancy.residence.idle:
                home = self._session.residences
                for key in [key for key, held in home.items() if held is tenancy.residence]:
                    home.pop(key).close()

    def __enter__(self) -> Self:
        """Use as a context manager closes the stream at the end of the block."""
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _clear(self) -> None:
        if isinstance(self._state, SlotState):  # the next frame may belong elsewhere
            self._state = StreamState(len(self._state))
        self._state.clear()

    def to(self, device: torch.device | str) -> Any:
        """Move the state to another device, after moving the model there."""
        with self._alone():
            self._weights.forget()
            self._constants.clear()
            self._fallbacks.clear()
            self._settle()
            self._move_out()
            self._state.map(lambda tensor: tensor.to(device))
            if self._signature is not None:
                shape, dtype, _, autocast = self._signature
                probe = torch.empty(0, device=device)
                self._signature = (shape, dtype, probe.device, autocast)
        return self

    def _settle(self) -> None:
        """Read what a step still in flight has to tell."""
        if isinstance(self._state, SlotState) and self._tenancy is not None:
            self._tenancy.settle(self._state)

    def _plain(self) -> StreamState:
        """The state as tensors of its own."""
        self._settle()
        return self._state.move_out() if isinstance(self._state, SlotState) else self._state

    def _alone(self, *, closing: bool = False) -> Exclusive:
        """One thread at a time, and out of inference mode."""
        if self._closed and not closing:
            raise StreamClosedError("This stream was closed; make another one from the model.")
        return Exclusive(self._busy)

    def _run(self, rows: Sequence[int], policies: Sequence[Policy | None], call: Call) -> Any:
        """Step the streams in `rows`; one that raises is undone, or the next recomputes all."""
        self._settle()
        self._described = call.frame
        census = self._weights.known
        recorded = census is not None and isinstance(self._state, SlotState)
        if census is None or not recorded or not census.same_places():
            recorded = False
            census = self._weights.check()
            check_mode(census)
        elif self._ran and not census.same_settings():
            census = self._weights.check()
        self._structure = census.structure
        signature = self._check_frame(call.frame, census)
        ready = policies_set(policies)
        if self._lodge(call.frame, ready):
            result, record = self._resident_step(rows, ready, call, census)
        else:
            result, record = self._plain_step(rows, ready, call)
        ran = not isinstance(self._state, SlotState) or not self._tenancy_of(call.frame).replayed
        if recorded:
            census = self._check_late(rows, settings=not ran) or census
        self._signature = signature
        # Attributes were looked at right before the model's code ran, so it changed them itself.
        self._weights.remember(census, ran=ran and (self._ran or not recorded))
        self._ran = ran
        self._last = record
        self._steps += 1
        if self._tenancy is not None and isinstance(self._state, SlotState):
            self._tenancy.settle_now(self._state)
        return result

    def _check_late(self, rows: Sequence[int], *, settings: bool) -> Census | None:
        """What a device need not wait for: looked at while it is at work, in turn.

        Where it raises, the step just queued does not count, and the streams recompute all.
        """
        try:
            return self._weights.check_part(self._steps, settings=settings)
        except EventfulError:
            for row in rows:
                self._state.frames[row] = -1
            raise

    def _lodge(self, frame: Tensor, policies: list[Policy]) -> bool:
        """Have the state where the step wants it: in slots if it can be resident, else not."""
        if frame.device.type not in residence.DEVICES:
            reason: str | None = "steps on this device ask the host"
        else:
            asked = (frame.device, tuple(policies), residence.DEVICES, ops.forced_backend())
            if self._lodging[0] != asked:
                found = residence.why_not(
                    self.config, policies, frame.device, plain=plain_attention(self._session)
                )
                self._lodging = (asked, found)
            reason = self._lodging[1]
        if reason is None and len(self._session.trunks) > 1:
            reason = "the model has several trunks"
        if reason is None and not isinstance(self._state, SlotState):
            self._state = self._tenancy_of(frame).move_in(self._state)
        elif reason is not None:
            self._move_out()
        return reason is None

    def _move_out(self) -> None:
        if isinstance(self._state, SlotState):
            self._state = self._state.move_out()
        self._tenancy = None

    def _tenancy_of(self, frame: Tensor) -> Tenancy:
        if self._tenancy is None:
            key = batched(signature_of(frame), None)
            home = residence.residence_of(self._session.residences, key, self.config)
            depth = sum(len(blocks) for blocks in self._session.blocks.values())
            self._tenancy = Tenancy(home, depth, self.check)
            self._tenancy.names = self._names
        return self._tenancy

    def _resident_step(
        self, rows: Sequence[int], policies: list[Policy], call: Call, census: Census
    ) -> tuple[Any, Callable[[], StepRecord]]:
        tenancy = self._tenancy_of(call.frame)
        census.note_contents()
        tenancy.residence.use_weights(census)
        state = self._state.take(rows)
        assert isinstance(state, SlotState)
        layouts = self._layouts(call.frame)
        fallback = self._fallbacks.of(call.frame, layouts)
        clock = start_clock(call.frame.device, current_stream(call.frame.device))
        try:
            result, record, timing = tenancy.step(
                call, state, policies, layouts, self._launch, fallback=fallback,
                maps=self.maps, capture=not census.hooked(),
            )  # fmt: skip
        except BaseException:
            state.rollback()
            self._state.put(rows, state)
            raise
        self._state.put(rows, state)
        read = clock()
        if fallback is not None and timing is not None:
            fallback.note(timing, read, first=self._signature is None, later=call.frame.is_cuda)

        def timed() -> StepRecord:
            made = record()
            made.clock = read
            return made

        return result, timed

    def _plain_step(
        self, rows: Sequence[int], policies: list[Policy], call: Call
    ) -> tuple[Any, Callable[[], StepRecord]]:
        rows, policies, call = self._usable(rows, policies, call)
        state = self._state.take(rows)
        passes = split_flushes(state, call)
        if passes is None:
            result, record = self._whole_or_flush(state, policies, call)
            self._state.put(rows, state)
            return result, lambda: record
        done = []
        for places in passes.rows:  # on copies of the state: either both passes count, or none
            part = state.take(places)
            some = [policies[i] for i in places]
            done.append((part, *self._whole_or_flush(part, some, call.on(call.frame[places]))))
        result = passes.join([made[1] for made in done])
        for places, (part, *_) in zip(passes.rows, done, strict=True):
            self._state.put([rows[i] for i in places], part)
        return result, lambda: passes.join_records([made[2] for made in done])

    def _whole_or_flush(
        self, state: StreamState, policies: list[Policy], call: Call
    ) -> tuple[Any, StepRecord]:
        """Run one pass, again as a flush where it needs memory that is not there."""
        try:
            return self._attempt(state, policies, call, everything=False)
        except FlushRequired:
            return self._attempt(state, policies, call, everything=True)

    def _usable(
        self, rows: Sequence[int], policies: list[Policy], call: Call
    ) -> tuple[Sequence[int], list[Policy], Call]:
        """What of a plain step can run; raises if nothing can."""
        check_finite(call.frame)
        return rows, policies, call

    def _layouts(self, frame: Tensor) -> dict[str, TokenLayout]:
        size = (frame.shape[-2], frame.shape[-1])
        if self._sized is None or self._sized[0] != size:
            layouts = {
                name: adapter.layout(trunk, size)
                for name, (trunk, adapter) in self._session.trunks.items()
            }
            self._sized = (size, layouts)
        return self._sized[1]

    def _attempt(
        self, state: StreamState, policies: list[Policy], call: Call, *, everything: bool
    ) -> tuple[Any, StepRecord]:
        flushing = [everything or frames < 0 for frames in state.frames]
        layouts = self._layouts(call.frame)
        fallback = self._fallbacks.of(call.frame, layouts)
        step = Step(
            self.config, state, policies, flushing, layouts, self.maps,
            dense_if=None if fallback is None else fallback.decide,
            constants=self._constants,
        )  # fmt: skip
        clock = start_clock(call.frame.device)
        state.begin()
        try:
            result = self._launch(step, call.run)
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
            first = self._signature is None
            fallback.note(timing, step.record.clock, first=first, later=False)
        return result, step.record

    def _launch(self, step: Step, forward: Callable[[], Any]) -> Any:
        """Run a forward call as a step."""
        if self._session.step is not None:
            raise ConcurrentUseError(
                "A stream of this model is in the middle of a step, and something in the model "
                "stepped another. Step it after the first has returned."
            )
        step.structure = self._structure
        self._session.step = step
        try:
            with torch.no_grad():
                result = forward()
            if not step.record.gates:
                raise UnsupportedError(
                    "The call reached no converted block. Call the part of the model that holds "
                    "them, e.g. stream.call('forward_features', frame)."
                )
            return result
        except BaseException as error:
            if step.record.gates or self._signature is not None or not is_refusal(error):
                raise
            # The first frame, and not even its tokens were made: the frame does not suit the model.
            raise cannot_take(self.model, self._described, error) from error
        finally:
            self._session.step = None

    def _expected(self, frame: Tensor) -> Signature | None:
        """What the frame must be like; None before the first."""
        return self._signature

    def _judge(self, method: str, frame: Tensor) -> None:
        """Refuse a frame of a kind the model cannot take, unless it is like the last."""
        known = self._signature
        if known is None or (frame.dim(), frame.dtype) != (len(known[0]), known[1]):
            judge_frame(self.model, method, frame)

    def _check_frame(self, frame: Tensor, census: Census) -> Signature:
        if frame.shape[0] == 0:
            raise FrameError("A batch of no frames; pass at least one.")
        if frame.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                "The frame requires gradients, which do not flow through a stream's memory. Call "
                "the model outside the stream to train, or pass frame.detach()."
            )
        device = census.device or frame.device
        if frame.device != device:
            raise FrameError(
                f"The frame is on {frame.device}, the model on {device}; move one, e.g. "
                f"frame.to('{device}')."
            )
        expected, signature = self._expected(frame), signature_of(frame)
        if expected is not None and signature != expected:
            raise FrameError(
                f"The stream holds {describe(expected)}, this frame is {describe(signature)}. "
                "Convert the frame, or start over with stream.reset()."
            )
        return signature
