"""What one stream and a batch of streams share: checks around a step, and what runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.budget.base import Budget
from eventful.config import Config, checked_policy, policies_set
from eventful.engine import plan as plans
from eventful.engine.advice import judge_frame
from eventful.engine.call import Call
from eventful.engine.control import Control, checked_budget
from eventful.engine.dense import Fallbacks, dense_form
from eventful.engine.device import DeviceExecutor
from eventful.engine.exclusive import Exclusive
from eventful.engine.executor import Check, Executor, StepResult
from eventful.engine.frames import (
    Signature,
    batched,
    cannot_take,
    describe,
    find_frame,
    is_refusal,
    refuse_attentions,
    signature_of,
)
from eventful.engine.grids import GridReader, tiles_of
from eventful.engine.guard import Guard, check_mode
from eventful.engine.host import HostExecutor
from eventful.engine.launch import NotReached
from eventful.engine.plan import StepPlan, precision
from eventful.engine.store import store_of
from eventful.engine.summary import Summary, Tally
from eventful.engine.view import ModelView
from eventful.errors import (
    ConfigError,
    EventfulError,
    FrameError,
    GradientError,
    StreamClosedError,
    UnsupportedError,
    WeightsChangedError,
)
from eventful.memory.state import RowState, StreamState
from eventful.policies import Always, Policy
from eventful.rules.record import StepRecord
from eventful.surgery.conversion import find_session, global_attention, needs_host
from eventful.surgery.matching import refuse_unreadable
from eventful.surgery.session import Session
from eventful.surgery.wrappers import (
    checked_model,
    compiled_in_place,
    holders,
    refuse_wrappers,
)
from eventful.tokens.layout import TokenLayout

Policies = Sequence[Policy | None] | Callable[[], Sequence[Policy | None]]


class Runner:
    """Owns the state of some streams; after a step that failed they go on with right results."""

    _partial = False  # frames that are not finite are left out while the others are stepped

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        *,
        maps: bool = False,
        check: Check = "async",
        budget: Budget | None = None,
    ) -> None:
        session = find_session(checked_model(model, type(self).__name__))
        if session is None:
            raise ConfigError(
                "This model is not converted; call eventful.convert(model, config) first."
            )
        self.model = model
        self._holders = self._refuse_wrapped(session)
        self.config: Config = session.config
        self._policy = checked_policy(policy) if policy is not None else self.config.policy
        self._policies: dict[str, Policy | None] = {}  # of a batch's streams, by name
        self.maps = maps
        self._session: Session = session
        self._fallbacks = Fallbacks(session)
        self._dense = False  # every frame runs dense, so the memory is not that of the rule
        self._executor: Executor = self._on_host(RowState(0))
        self.check = check
        self._last: Callable[[], StepRecord] | None = None
        self._tally = Tally()
        self._signature: Signature | None = None
        self._weights = Guard(model, session)
        self._grids = GridReader(model, session)
        self._planned: tuple[Hashable, StepPlan] | None = None
        self._steps = 0
        self._sized: tuple[Hashable, dict[str, TokenLayout]] | None = None
        self._busy = threading.Lock()
        self._closed = False
        self._ran = True  # the model's own code ran in the last step
        self._control = Control()
        self._control.asked = checked_budget(budget, self.config, batch=self._partial)

    def _refuse_wrapped(self, session: Session) -> list[nn.Module]:
        """Raise where compiled or wrapped code hides blocks; returns the modules that hold them."""
        trunks = [trunk for trunk, _ in session.trunks.values()]
        blocks = [block for sequence in session.sequence.values() for block in sequence]
        then = f"eventful.{type(self).__name__}(converted)"
        refuse_wrappers(self.model, [*trunks, *blocks], then)
        for name, (trunk, adapter) in session.trunks.items():
            refuse_unreadable(name, trunk, adapter)
        return holders(self.model, [*trunks, *blocks])

    @property
    def check(self) -> Check:
        """When steps on a GPU report a bad frame; another takes effect from the next step on."""
        return self._check

    @check.setter
    def check(self, check: Check) -> None:
        if check not in get_args(Check):
            raise ConfigError(f"check is 'async' or 'sync'; got {check!r}.")
        self._check: Check = check
        self._executor.check = check

    @property
    def _state(self) -> StreamState:
        return self._executor.state

    def _on_host(self, state: RowState) -> HostExecutor:
        return HostExecutor(self._session, state, self._fallbacks, partial=self._partial)

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
        return None if self._last is None else self._last()

    def summary(self) -> Summary:
        """What the steps since the start, or the last `reset`, did in sum."""
        return self._tally.sum(self._fallbacks.dense_ms(), **self._control.log.totals())

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return self._state.nbytes

    def reset(self) -> None:
        """Forget everything; the next frame may have another size, and flushes."""
        with self._alone():
            self._executor = self._on_host(self._blank())
            self._signature = None
            self._weights.drop()
            self._fallbacks.clear()
            self._planned = None
            self._last = None
            self._tally = Tally()
            self._steps = 0
            self._control.forget()

    def _blank(self) -> RowState:
        """The state of these streams before their first frame."""
        return RowState(len(self._state))

    def close(self) -> None:
        """Give the memory back; the stream cannot be stepped any more.

        On a GPU the memory of a model's streams of one frame size, and what was recorded for
        them, goes with the last of them.
        """
        with self._alone(closing=True):
            self._closed = True
            self._executor.close()
            self._executor = self._on_host(RowState(0))
            self._weights.drop()
            self._planned = None
            self._last = None

    def __enter__(self) -> Self:
        """Use as a context manager closes the stream at the end of the block."""
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def to(self, device: torch.device | str) -> Any:
        """Move the state to another device, after moving the model there."""
        with self._alone():
            self._weights.forget()
            self._fallbacks.clear()
            self._planned = None
            state = self._detached()
            self._executor = self._on_host(state)
            state.map(lambda tensor: tensor.to(device))
            if self._signature is not None:
                shape, dtype, _, autocast = self._signature
                probe = torch.empty(0, device=device)
                self._signature = (shape, dtype, probe.device, autocast)
        return self

    def _detached(self) -> RowState:
        """The state as tensors of its own, once all steps have reported."""
        self._executor.drain()
        return RowState(len(self._state)) if self._dense else self._state.detached()

    def _alone(self, *, closing: bool = False) -> Exclusive:
        """One thread at a time, and out of inference mode."""
        if self._closed and not closing:
            raise StreamClosedError("This stream was closed; make another one from the model.")
        return Exclusive(self._busy)

    def _run(self, rows: Sequence[int], policies: Policies, call: Call) -> StepResult:
        """Step the streams in `rows`; one that raises is undone, or the next recomputes all."""
        try:
            return self._step(rows, policies, call)
        except NotReached as failed:
            self._forget_first()
            raise self._refusal(call, failed.error) from failed.error.__cause__
        except WeightsChangedError:
            self._forget_first()
            self._refuse_wrapped(self._session)  # a part that was compiled looks like another one
            raise
        except BaseException:
            self._forget_first()
            raise

    def _forget_first(self) -> None:
        """After a first frame that failed, the next one may have another size."""
        if self._signature is None:
            self._executor, self._planned = self._on_host(RowState(len(self._state))), None

    def _step(self, rows: Sequence[int], policies: Policies, call: Call) -> StepResult:
        """See `_run`."""
        self._executor.settle()
        if compiled_in_place(self._holders):  # since the stream was made
            self._refuse_wrapped(self._session)
        if callable(policies):
            policies = policies()
        view, late = self._check_weights()
        plan = self._plan(policies, call, view)
        if plan.dense is not None:
            self._executor.flush(rows)
        done = self._executor.step(rows, plan, call, view)
        if late and not self._state.reversible:
            view = self._check_late(rows, settings=not done.ran_model) or view
        self._executor.finish()
        self._signature = self._signature or signature_of(call.frame)
        # Attributes were looked at right before the model's code ran, so it changed them itself.
        self._weights.remember(view, ran=done.ran_model and (self._ran or not late))
        self._ran = done.ran_model
        self._last = record = _once(done.record, plan.dense)
        self._tally.add(record, now=self._state.reversible)
        self._steps += 1
        return done

    def _check_weights(self) -> tuple[ModelView, bool]:
        """Check the model before a step.

        Returns:
            What was seen of it, and whether the rest is checked while the device is at work.
        """
        known = self._weights.known
        if known is None or self._state.reversible or not known.same_places():
            view = self._weights.check()
            check_mode(view)
            return view, False
        if self._ran and not known.same_settings():
            return self._weights.check(), True
        return known, True

    def _check_late(self, rows: Sequence[int], *, settings: bool) -> ModelView | None:
        """What a device need not wait for: looked at while it is at work, in turn.

        Where it raises, the step just queued does not count, and the streams recompute all.
        """
        try:
            return self._weights.check_part(self._steps, settings=settings)
        except EventfulError:
            self._executor.flush(rows)
            raise

    def _refusal(self, call: Call, error: Exception) -> Exception:
        """What to raise for a call that failed before it reached a converted block."""
        if self._signature is not None or not is_refusal(error):
            return error
        # The first frame, and not even its tokens were made: the frame does not suit the model.
        refusal = cannot_take(self.model, call.frame, error)
        refusal.__cause__ = error
        return refusal

    def _plan(self, policies: Sequence[Policy | None], call: Call, view: ModelView) -> StepPlan:
        """What the step shares with others like it; checked and worked out for the first."""
        frame = call.frame
        _refuse_gradients(frame)
        numbers = precision(frame.device)
        key = (
            self._expected(frame), frame.shape, frame.dtype, frame.device, view.device,
            call.key(), tuple(policies), self.maps, numbers, ops.forced_backend(),
            tuple(plans.DEVICES),
        )  # fmt: skip
        if self._planned is not None and self._planned[0] == key:
            return self._planned[1]
        self._check_frame(frame, view)
        ready = policies_set(policies)
        layouts = self._layouts(call)
        dense = self._fallbacks.always(frame.device.type in plans.DEVICES)
        if dense is None:
            fallback = self._fallbacks.of(frame, layouts)
            plan = StepPlan(self.config, ready, layouts, fallback, self.maps, numbers)
        else:
            self._session.warn_once(dense)
            config, all_ = dense_form(self._session), [Always()] * len(ready)
            plan = StepPlan(config, [*all_], layouts, None, self.maps, numbers, dense)
        self._choose_executor(frame, plan)
        self._planned = (key, plan)
        return plan

    def _choose_executor(self, frame: Tensor, plan: StepPlan) -> None:
        """Have the state where the step needs it: in slots if it can do without the host."""
        reason = plans.needs_host(
            plan.config,
            plan.policies,
            frame.device,
            global_only=lambda: global_attention(self._session),
        )
        reason = reason or needs_host(self._session, plan.layouts)
        dense = plan.dense is not None
        if self._state.reversible is (reason is not None) and dense is self._dense:
            return
        blank = dense or self._dense  # what a dense step keeps is of no use to another rule
        state = RowState(len(self._state)) if blank else self._state.detached()
        self._dense = dense
        if reason is not None:
            self._executor = self._on_host(state)
            return
        store = store_of(self._session.stores, batched(signature_of(frame), None))
        self._executor = DeviceExecutor(self._session, store, state, self.check, self._names)

    def _layouts(self, call: Call) -> dict[str, TokenLayout]:
        size, grid = (call.frame.shape[-2], call.frame.shape[-1]), call.grid
        if self._sized is None or self._sized[0] != (size, grid):
            layouts = {
                name: adapter.layout(trunk, size)
                if grid is None
                else adapter.grid_layout(trunk, grid)
                for name, (trunk, adapter) in self._session.trunks.items()
            }
            self._sized = ((size, grid), layouts)
        return self._sized[1]

    def _call_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A user's call; raises for a frame that the model cannot take."""
        source: Tensor | None = None
        patches = self._grids.find(method, args, kwargs)
        if patches is not None:
            source, frame = patches
        else:
            frame = find_frame(self.model, args, kwargs)
            tiles = tiles_of(self.model, frame)
            if tiles is not None and self._partial:
                raise UnsupportedError(
                    "A StreamBatch takes one frame per stream, and these pictures come in tiles "
                    f"{tuple(frame.shape)}. Have a Stream for each video."
                )
            if tiles is not None:
                source, frame = frame, tiles
            self._judge(method, frame)
        refuse_attentions(self.model, kwargs)
        return Call.of(self.model, method, args, kwargs, frame, source)

    def _expected(self, frame: Tensor) -> Signature | None:
        """What the frame must be like; None before the first."""
        return self._signature

    def _judge(self, method: str, frame: Tensor) -> None:
        """Refuse a frame of a kind the model cannot take, unless it is like the last."""
        known = self._signature
        if known is None or (frame.dim(), frame.dtype) != (len(known[0]), known[1]):
            judge_frame(self.model, method, frame)

    def _check_frame(self, frame: Tensor, view: ModelView) -> None:
        if frame.shape[0] == 0:
            raise FrameError("A batch of no frames; pass at least one.")
        device = view.device or frame.device
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


def _once(make: Callable[[], StepRecord], dense: str | None) -> Callable[[], StepRecord]:
    """The same record each time, made when it is first asked for.

    Args:
        dense: why every frame runs dense, if it does.
    """
    made: list[StepRecord] = []

    def get() -> StepRecord:
        if not made:
            made.append(make())
            if dense is not None:
                made[0].fallback, made[0].reason = True, dense
        return made[0]

    return get


def _refuse_gradients(frame: Tensor) -> None:
    if frame.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            "The frame requires gradients, which do not flow through a stream's memory. Call "
            "the model outside the stream to train, or pass frame.detach()."
        )
